"""Functions by number, the server's side: a definition is noted as it comes and looked up when it is first called.

What functions of the caller's script take along, they share here with each other. So all that comes of the script is
unpacked in the order in which it came, and before any call that came after it.

The other side is `client/function_table.py`.
"""

import itertools
from typing import Any

from telegrad.errors import ProtocolError, SerializationError
from telegrad.rpc.trust.exports import MOST_NAME_BYTES, find_export
from telegrad.wire.codec import unpack
from telegrad.wire.definitions import ANEW, NAMED, NEWS, OF_A_SCRIPT, OF_A_SCRIPT_IN_PART

MOST_FUNCTIONS = 8192  # of one caller; ours ends at half as many
MOST_BYTES = 128 * 2**20
_DEFINITIONS = (OF_A_SCRIPT, OF_A_SCRIPT_IN_PART, ANEW)
_WHOLE = (OF_A_SCRIPT, ANEW)  # these bring all that a function uses


class FunctionTable:
    """The functions that one caller has given numbers. Several threads use it."""

    def __init__(self, caller: str, *, exports_only: bool = False) -> None:
        self._caller = caller
        self._exports_only = exports_only
        self.found: dict[int, Any] = {}  # what may be called at once: empty after there was news
        self.made: dict[int, Any] = {}  # all that were looked up
        self._defined: dict[int, bytes] = {}  # as they came; to look one up may take long
        self._bytes = 0  # of all definitions
        self._news: dict[int, tuple[int, bytes]] = {}  # of scripts, by arrival: for which function, and what it is
        self._arrivals = itertools.count()
        self._whole: dict[int, int] = {}  # by function of a script: when all that it uses last came, by arrival
        self._failed = (-1, "")  # the last that could not be unpacked: its arrival, and why

    def note(self, call: Any) -> None:
        """Keep the definition that a call carries. ProtocolError beyond what one caller may define.

        The next request may name the function by its number. That one may run first, in another thread, and this one
        may be refused before it is run: so this comes before anything else, in the order of arrival."""
        number, definition = call.function, call.definition
        form = definition[:1] if number and not self._exports_only else b""
        if form in (NEWS, ANEW):
            waiting = sum([len(news) for _, news in list(self._news.values())])
            if len(self._news) >= MOST_FUNCTIONS or waiting + len(definition) > MOST_BYTES:
                raise ProtocolError(f"{MOST_FUNCTIONS} changes, or {MOST_BYTES} bytes of them, wait for a call to run")
            self._keep_news(number, definition)
        elif number and number not in self._defined:
            named = not self._exports_only or len(definition) <= MOST_NAME_BYTES
            definition = definition if named else b""  # what is longer than any name is refused, and not kept
            self._bytes += len(definition)
            if len(self._defined) >= MOST_FUNCTIONS or self._bytes > MOST_BYTES:
                raise ProtocolError(f"it defines more than {MOST_FUNCTIONS} functions, or more than {MOST_BYTES} bytes")
            self._defined[number] = definition
            if form in _DEFINITIONS:
                self._keep_news(number, definition)

    def _keep_news(self, number: int, news: bytes) -> None:
        self._news[next(self._arrivals)] = (number, news)
        self.found = {}  # last: who still fills the one before has looked for news before

    def definition(self, number: int) -> bytes | None:
        """What a number stands for, as it came."""
        return self._defined.get(number)

    def resolve(self, number: int) -> Any:
        """The function that a number stands for."""
        found = self.found
        if self._news:
            self._take_news()
        self._check(number)
        function = self.made.get(number)
        if function is None:
            definition = self._defined.get(number)
            if definition is None:
                raise ProtocolError(f"call of function number {number}, which was never defined on this link")
            if definition[:1] == NAMED or self._exports_only:
                return find_export(definition, self._caller).function  # each time: it may be withdrawn
            payload = definition[1:] if definition[:1] in _DEFINITIONS else definition
            function = self.made.setdefault(number, unpack(payload, []))
        found[number] = function
        return function

    def _take_news(self) -> None:
        """Unpack what has come of scripts. Two threads may do so at once: what came is entered once."""
        for arrival, (function, news) in list(self._news.items()):
            try:
                value = unpack(memoryview(news)[1:], [])
            except Exception as error:
                if arrival > self._failed[0]:
                    self._failed = (arrival, str(error))
            else:
                if news[:1] in _DEFINITIONS:
                    self.made.setdefault(function, value)
                if news[:1] in _WHOLE:
                    self._whole[function] = max(arrival, self._whole.get(function, -1))
            self._news.pop(arrival, None)  # last: who finds none does not look here

    def _check(self, number: int) -> None:
        """Of what could not be unpacked nobody knows for whom it was: the caller has to send all again that a function
        uses, before that may be called."""
        arrival, why = self._failed
        if arrival > self._whole.get(number, -1) and self._defined.get(number, b"")[:1] in _DEFINITIONS:
            error = SerializationError(why)
            error.of_script = True
            raise error
