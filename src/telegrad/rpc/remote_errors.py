"""An exception on its way home: what was raised on another worker is raised here, as its own type.

The exception arrives as it left: its type, arguments and attributes. What happened on the workers it passed comes with
it as a note, which Python prints below the message: one section for each worker, the innermost last, with the frames of
the user's code. `TELEGRAD_TRACEBACK=full` on a worker shows all of its frames. Where the type cannot be rebuilt here,
`RemoteError` stands for it. Where it leaves Telegrad, in `rpc_sync`, `wait` and the like, our own frames are taken out
of its traceback.
"""

import copy
import itertools
import logging
import os
import re
import secrets
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from telegrad import errors
from telegrad.errors import RemoteError, TelegradError
from telegrad.rpc.torch_modes import stand_in
from telegrad.rpc.trust.rate import TokenBucket
from telegrad.rpc.workers import WorkerInfo
from telegrad.wire.codec import pack, unpack
from telegrad.wire.messages import ExceptionReply
from telegrad.wire.tensor.tensors import disassemble

log = logging.getLogger("telegrad.rpc")
_MOST_OF_STRANGER, _MOST_TYPE_NAME = 2000, 200  # characters of what one says that is not trusted

_MAX_TEXT = 200_000
_MAX_SHORT = 1000
_MOST_FRAMES = 5  # of one worker; more are counted, not shown
_MOST_OF_GROUP = 3  # exceptions of a group that are shown with their frames
_OWN_CODE = str(Path(__file__).parents[1]) + os.sep
# How a module is called: two frames for each module on the way, which say nothing.
_MODULE_CODE = os.path.join("torch", "nn", "modules", "module.py")
# Who calls the user's code, and is not it: awaits it, runs it in a thread, gives it a gradient.
_CALLERS = ("/asyncio/", "/concurrent/futures/", "/torch/autograd/function.py")
_incidents = TokenBucket(1.0, 100.0)  # that are logged


class RemoteNote(str):
    """The sections of the workers an exception came through. It is written anew at each hop, so it does not travel."""

    __slots__ = ()

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteNote, ("",)


# --- leaving ---


def describe_exception(error: BaseException, here: WorkerInfo, main_by_value: bool) -> tuple[Any, ...]:
    """The content of a failure reply: message, payload, tensor table and memory. With `main_by_value` a class of this
    program's own `__main__` is sent whole, for a caller that runs another program."""
    sections = f"On worker {here.name!r} (id {here.id}):\n" + "\n".join(_section(error))
    message = ExceptionReply(here.name, type(error).__qualname__, _shown(str, error), sections[-_MAX_TEXT:])
    try:
        packed = pack(_portable(error), main_by_value=main_by_value)
        tensors, memory = disassemble(packed.tensors) if packed.tensors else ((), ())
    except Exception:  # whatever it holds that cannot be sent, the reply must leave
        return message, b"", (), ()
    return message, packed.payload, tensors, memory


def describe_in_short(error: BaseException, here: WorkerInfo) -> tuple[Any, ...]:
    """The same for a peer that is not trusted: nothing pickled, no source, and no text but Telegrad's own."""
    text = text_for_stranger(error)
    return ExceptionReply(here.name, type(error).__qualname__, text[:_MAX_SHORT], ""), b"", (), ()


def text_for_stranger(error: BaseException) -> str:
    """What a peer that is not trusted is told of an error. What a user's function said may have been about its data: it
    is logged here, under a number that the peer is told."""
    if isinstance(error, TelegradError):
        return _shown(str, error)
    if not _incidents.take():  # a peer may let a function fail as often as it may call it
        return f"a {type(error).__qualname__}, whose text stays there; so many failed that this one was not logged"
    incident = secrets.token_hex(4)
    log.warning("incident %s, of which a peer was told only the number:", incident, exc_info=error)
    return f"its text stays there; ask its owner about incident {incident}"


def text_of_stranger(text: str) -> str:
    """What a peer that is not trusted says, as it may be shown: no lines, colours or pages of its own."""
    shown = text if len(text) <= _MOST_OF_STRANGER else text[:_MOST_OF_STRANGER] + "..."
    return "".join([c if c.isprintable() else " " for c in shown])


def rebuild_from_stranger(message: ExceptionReply, worker: str) -> Exception:
    """The exception to raise here for what a peer says that is not trusted: a type and a text."""
    text, name = text_of_stranger(message.text), text_of_stranger(message.type_name[:_MOST_TYPE_NAME])
    return _rebuild_short(ExceptionReply(worker, name, text, ""))


def _section(error: BaseException) -> Iterator[str]:
    """What happened on this worker, and on those the exception came from."""
    full = shows_all_frames()
    for each in _chain(error):
        if each is not error:
            yield from _frames(each, full)
            yield f"  {in_one_line(each)}"
            yield from _came_with(each)
            yield "  which led to:"
    yield from _frames(error, full)
    yield from _came_with(error)
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions[:_MOST_OF_GROUP]:
            yield f"  of which {in_one_line(each)}"
            yield from (f"  {line}" for line in _section(each))


def _chain(error: BaseException) -> list[BaseException]:
    """The exceptions that led to this one, the first of them first, as Python would print them."""
    chain = [error]
    while True:
        last = chain[-1]
        before = last.__cause__ if last.__cause__ is not None or last.__suppress_context__ else last.__context__
        if before is None or any(before is each for each in chain):
            return chain[::-1]
        chain.append(before)


def _frames(error: BaseException, full: bool) -> Iterator[str]:
    frames = traceback.extract_tb(error.__traceback__)
    shown = frames if full else list(itertools.dropwhile(_calls, (f for f in frames if not _is_internal(f.filename))))
    if len(shown) > _MOST_FRAMES and not full:
        yield f"  ({len(shown) - _MOST_FRAMES} more frames; TELEGRAD_TRACEBACK=full shows all)"
        shown = shown[-_MOST_FRAMES:]
    for frame in shown:
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        if frame.line:
            yield f"    {frame.line}"
    if frames and not shown:
        yield "  in Telegrad's own code (TELEGRAD_TRACEBACK=full shows it)"


def shows_all_frames() -> bool:
    """Whether the user asked to see the frames of Telegrad, too."""
    return os.environ.get("TELEGRAD_TRACEBACK") == "full"


def _is_internal(filename: str) -> bool:
    return filename.startswith(_OWN_CODE) or filename.endswith(_MODULE_CODE)


def _calls(frame: traceback.FrameSummary) -> bool:
    return any(caller in frame.filename for caller in _CALLERS)


def _came_with(error: BaseException) -> list[str]:
    return [line for note in _remote_notes(error) for line in note.splitlines()]


def _remote_notes(error: BaseException) -> list[RemoteNote]:
    return [note for note in getattr(error, "__notes__", ()) if isinstance(note, RemoteNote)]


def in_one_line(error: BaseException) -> str:
    """The type and the first line of the text."""
    text = _shown(str, error).split("\n", 1)[0]
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def _shown(how: Callable[[object], str], error: BaseException) -> str:
    try:
        return how(error)[:_MAX_TEXT]
    except Exception:
        return f"<{type(error).__qualname__}, which cannot say its own text>"


def _portable(error: BaseException) -> Any:
    """An exception whose class has an `__init__` of its own takes its parts along: pickle would call the class with
    `error.args`, which need not be what that takes."""
    if not stand_in.in_force.errors_take_parts or not _has_parts(error):
        return error
    if isinstance(error, BaseExceptionGroup):
        return _Parts(type(error), (error.message, [_portable(each) for each in error.exceptions]), error.__dict__)
    return _Parts(type(error), error.args, error.__dict__)


def _has_parts(error: BaseException) -> bool:
    """Whether the arguments and attributes are all there is of it: a builtin may have fields beside them."""
    cls = type(error)
    written_in_python = hasattr(cls.__init__, "__code__") or isinstance(error, BaseExceptionGroup)
    return (
        written_in_python and cls.__reduce__ is BaseException.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__
    )


class _Parts:
    """Pickles as a call of `_put_together`."""

    def __init__(self, cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> None:
        self._content = (cls, args, state)

    def __reduce__(self) -> tuple[object, ...]:
        return _put_together, self._content


def _put_together(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def without_traceback(error: BaseException) -> BaseException:
    """A copy to raise or to keep, so that no frame is kept with it; itself, if it does not like to be rebuilt."""
    try:
        parts = (type(error), error.args, error.__dict__)
        fresh: BaseException = _put_together(*parts) if _has_parts(error) else copy.copy(error)
    except Exception:
        return error.with_traceback(None)
    if type(fresh) is not type(error):
        return error.with_traceback(None)
    fresh.__cause__ = error.__cause__
    fresh.__suppress_context__ = error.__suppress_context__
    return fresh


def without_frames(error: BaseException, before: tuple[BaseException, ...] = ()) -> BaseException:
    """The same, and so with what it was raised from: of that, where it was raised is kept as a note."""
    kept, cause = without_traceback(error), error.__cause__
    before = (*before, error)
    if cause is not None and not any(cause is each for each in before):
        where = [*_frames(cause, shows_all_frames())]
        kept.__cause__ = told = without_frames(cause, before)
        if where and told is not cause:
            told.__notes__ = [*getattr(told, "__notes__", ()), "\n".join(["It was raised here:", *where])]
    return kept


# --- arriving ---


def rebuild_exception(message: ExceptionReply, payload: Any, tensors: list[torch.Tensor]) -> BaseException:
    """The exception to raise here."""
    error: Any = None
    if len(payload):
        try:
            error = unpack(payload, tensors)
        except Exception:
            error = None  # its class does not exist here, or does not like to be rebuilt
    if error is None and not message.traceback:
        return _rebuild_short(message)
    if not isinstance(error, Exception):
        error = RemoteError(
            f"{message.type_name} on worker {message.worker!r}: {message.text}\n"
            "Its type cannot be rebuilt here. Original exception on remote side was:"
        )
    notes = [note for note in getattr(error, "__notes__", ()) if not isinstance(note, RemoteNote)]
    error.__notes__ = [*notes, RemoteNote(message.traceback)]
    return error  # type: ignore[no-any-return] # typed by what it comes from


def _rebuild_short(message: ExceptionReply) -> Exception:
    """The error of a worker that says no more than its type and a text: one of Telegrad's own keeps its type."""
    text = f"{message.text}\nOn worker {message.worker!r}"
    kind = getattr(errors, message.type_name, None) if message.type_name.isidentifier() else None
    if isinstance(kind, type) and issubclass(kind, TelegradError):
        return kind(text)
    return RemoteError(f"{message.type_name} on worker {message.worker!r}: {message.text}")


def raised_on(error: BaseException) -> int | None:
    """The id of the worker that an exception came from directly; None if it was raised here."""
    for note in _remote_notes(error):
        found = re.match(r"On worker '[^']*' \(id (\d+)\)", note)
        if found:
            return int(found[1])
    return None


def hide_own_frames(error: BaseException) -> None:
    """Before an exception that came from another worker, is Telegrad's own, or is Ctrl-C while a call is waited for
    leaves Telegrad: forget how it passed through here. The user's frames stay: a hook, say, that made a call in a
    backward pass."""
    if not (_remote_notes(error) or isinstance(error, TelegradError | KeyboardInterrupt)) or shows_all_frames():
        return
    frames = []
    each = error.__traceback__
    while each is not None:
        if not each.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
            frames.append(each)
        each = each.tb_next
    kept = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = kept


def with_notes(error: BaseException) -> str:
    """The text of an exception and what comes with it, for those who get no more of it than a text."""
    return "\n".join([_shown(str, error), *getattr(error, "__notes__", ())])
