"""The functions that one caller has given numbers: from then on a number is all it sends.

A definition is noted when it comes and looked up when it is first called, which may take long, or never.
"""

from collections.abc import Iterable
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.wire.frames import Frame
from telegrad.wire.messages import PythonCall, PythonRemoteCall, RpcWithAutograd, RpcWithProfiling

MOST_FUNCTIONS = 8192  # of one caller; ours ends at half as many
MOST_BYTES = 128 * 2**20


class Definition:
    """A function that came with its number and has not been looked up yet."""

    __slots__ = ("payload",)

    def __init__(self, payload: bytes) -> None:
        self.payload = payload


class Functions(dict[int, Any]):
    """Functions and definitions, by their number."""

    __slots__ = ("defined_bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.defined_bytes = 0


def note_definitions(functions: Functions, frames: Iterable[Frame]) -> None:
    """Take in what messages define. ProtocolError beyond what one caller may define.

    The next request may name the function by its number. That one may run first, in another thread, and this one may be
    refused before it is run: so this comes before anything else, in the order of arrival."""
    for frame in frames:
        call: Any = frame.message
        while type(call) is RpcWithAutograd or type(call) is RpcWithProfiling:
            call = call.call
        if (type(call) is PythonCall or type(call) is PythonRemoteCall) and call.definition and call.function:
            _note(functions, call)


def _note(functions: Functions, call: PythonCall | PythonRemoteCall) -> None:
    if call.function not in functions:
        functions.defined_bytes += len(call.definition)
        if len(functions) >= MOST_FUNCTIONS or functions.defined_bytes > MOST_BYTES:
            raise ProtocolError(f"it defines more than {MOST_FUNCTIONS} functions, or more than {MOST_BYTES} bytes")
        functions[call.function] = Definition(call.definition)
