"""Functions by number, the server's side: a definition is noted as it comes and looked up when it is first called.

The other side is `client/function_table.py`.
"""

from typing import Any

from telegrad.errors import ProtocolError
from telegrad.rpc.trust.exports import MOST_NAME_BYTES, NAMED, find_export
from telegrad.wire.codec import unpack

MOST_FUNCTIONS = 8192  # of one caller; ours ends at half as many
MOST_BYTES = 128 * 2**20


class FunctionTable:
    """The functions that one caller has given numbers. Several threads use it."""

    def __init__(self, caller: str, *, exports_only: bool = False) -> None:
        self._caller = caller
        self._exports_only = exports_only
        self.found: dict[int, Any] = {}
        self._defined: dict[int, bytes] = {}  # as they came; to look one up may take long
        self._bytes = 0  # of all definitions

    def note(self, call: Any) -> None:
        """Keep the definition that a call carries. ProtocolError beyond what one caller may define.

        The next request may name the function by its number. That one may run first, in another thread, and this one
        may be refused before it is run: so this comes before anything else, in the order of arrival."""
        if call.function and call.function not in self._defined:
            named = not self._exports_only or len(call.definition) <= MOST_NAME_BYTES
            definition = call.definition if named else b""  # what is longer than any name is refused, and not kept
            self._bytes += len(definition)
            if len(self._defined) >= MOST_FUNCTIONS or self._bytes > MOST_BYTES:
                raise ProtocolError(f"it defines more than {MOST_FUNCTIONS} functions, or more than {MOST_BYTES} bytes")
            self._defined[call.function] = definition

    def definition(self, number: int) -> bytes | None:
        """What a number stands for, as it came."""
        return self._defined.get(number)

    def resolve(self, number: int) -> Any:
        """The function that a number stands for."""
        function = self.found.get(number)
        if function is None:
            definition = self._defined.get(number)
            if definition is None:
                raise ProtocolError(f"call of function number {number}, which was never defined on this link")
            if definition[:1] == NAMED or self._exports_only:
                return find_export(definition, self._caller).function  # each time: it may be withdrawn
            function = self.found[number] = unpack(definition, [])
        return function
