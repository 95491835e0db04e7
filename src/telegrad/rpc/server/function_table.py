"""Functions by number, the server's side: a definition is noted as it comes and looked up when it is first called.

What functions of the caller's script take along, they share here with each other. So all that comes of the script is
unpacked in the order in which it came, and before any call that came after it.

The other side is `client/function_table.py`.
"""

import itertools
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.rpc.trust.exports import MOST_NAME_BYTES, NAMED, find_export
from telegrad.wire.codec import unpack
from telegrad.wire.messages import NEWS, OF_A_SCRIPT

MOST_FUNCTIONS = 8192  # of one caller; ours ends at half as many
MOST_BYTES = 128 * 2**20


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
        self._failed: dict[int, bytes] = {}  # by function: news that could not be unpacked

    def note(self, call: Any) -> None:
        """Keep the definition that a call carries. ProtocolError beyond what one caller may define.

        The next request may name the function by its number. That one may run first, in another thread, and this one
        may be refused before it is run: so this comes before anything else, in the order of arrival."""
        number, definition = call.function, call.definition
        form = definition[:1] if number and not self._exports_only else b""
        if form == NEWS:
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
            if form == OF_A_SCRIPT:
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
        if self._news or self._failed:
            self._take_news(number)
        function = self.made.get(number)
        if function is None:
            definition = self._defined.get(number)
            if definition is None:
                raise ProtocolError(f"call of function number {number}, which was never defined on this link")
            if definition[:1] == NAMED or self._exports_only:
                return find_export(definition, self._caller).function  # each time: it may be withdrawn
            payload = definition[1:] if definition[:1] == OF_A_SCRIPT else definition
            function = self.made.setdefault(number, unpack(payload, []))
        found[number] = function
        return function

    def _take_news(self, number: int) -> None:
        """Unpack what has come of scripts. Two threads may do so at once: what came is entered once."""
        for arrival, (function, news) in list(self._news.items()):
            try:
                self._unpack_news(function, news)
                self._failed.pop(function, None)
            except Exception:
                if function in self._defined:
                    self._failed[function] = news  # which says why to those who call that function
            self._news.pop(arrival, None)
        if number in self._failed:
            self._unpack_news(number, self._failed[number])
            self._failed.pop(number, None)

    def _unpack_news(self, number: int, news: bytes) -> None:
        value = unpack(memoryview(news)[1:], [])
        if news[:1] == OF_A_SCRIPT:
            self.made.setdefault(number, value)
