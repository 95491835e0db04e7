"""An exception on its way home: what happened on another worker, raised here as its own type with both stacks visible.

The text of the exception names the worker and carries the remote traceback. The exception itself travels too where it
can be pickled, so that its attributes survive; where it cannot be rebuilt, `RemoteError` stands for it.
"""

import traceback
from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import RemoteError, TelegradError
from telegrad.rpc.workers import WorkerInfo
from telegrad.wire.codec import pack, unpack
from telegrad.wire.messages import ExceptionReply
from telegrad.wire.tensors import disassemble

_MAX_TEXT = 200_000


class RemoteTraceback(Exception):
    """The traceback on the other worker, as the cause of the exception raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def describe_exception(error: BaseException, here: WorkerInfo) -> tuple[Any, ...]:
    """The content of a failure reply: message, payload, tensor table and memory."""
    trace = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    text = f"On {here!r}:\n{trace}"
    message = ExceptionReply(here.name, type(error).__qualname__, _shown(str, error), text)
    try:
        packed = pack(error)
        tensors, memory = disassemble(packed.tensors) if packed.tensors else ((), ())
    except Exception:  # whatever it holds that cannot be sent, the reply must leave
        return message, b"", (), ()
    return message, packed.payload, tensors, memory


def _shown(how: Callable[[object], str], error: BaseException) -> str:
    try:
        return how(error)[:_MAX_TEXT]
    except Exception:
        return f"<{type(error).__qualname__}, which cannot say its own text>"


def rebuild_exception(message: ExceptionReply, payload: Any, tensors: list[torch.Tensor]) -> BaseException:
    """The exception to raise here."""
    error: Any = None
    if len(payload):
        try:
            error = unpack(payload, tensors)
        except Exception:
            error = None  # its class does not exist here, or does not like to be rebuilt
    if not isinstance(error, Exception):
        error = RemoteError(
            f"{message.type_name} on worker {message.worker!r}: {message.text}\n"
            f"Its type cannot be rebuilt here. Original exception on remote side was:\n{message.traceback}"
        )
    elif _speaks_by_its_text(error):
        error.args = (f"{error.args[0]}\n{message.traceback}",)
    else:
        error.add_note(message.traceback)
    error.__cause__ = RemoteTraceback(message.traceback)
    return error  # type: ignore[no-any-return]


def _speaks_by_its_text(error: Exception) -> bool:
    """Whether its only argument is its text, so that the text can be added to without a loss."""
    own_str = type(error).__str__ in (Exception.__str__, BaseException.__str__)
    single = len(error.args) == 1 and isinstance(error.args[0], str)
    return single and (own_str or isinstance(error, TelegradError)) and not isinstance(error, OSError)
