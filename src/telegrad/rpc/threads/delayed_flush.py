"""What a connection holds back to share a write is written with the next message, or by the delayed flush in time."""

import logging
import time

from telegrad.rpc.threads.timer import Timer
from telegrad.transport.connection import Connection

log = logging.getLogger("telegrad.rpc")

LAZY = 0.005  # for what nobody waits for
BURST = 0.001  # for calls in a burst, whose replies usually write them sooner

_FOREVER = float("inf")


class DelayedFlush:
    """Sees that nothing is held back for long. Called by many threads; a race costs one more look of the timer.

    As long as there is something each time it looks, it looks again after `LAZY`: to tell the timer of a new time wakes
    its thread, which would take the interpreter from whoever holds back something.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._holding: set[Connection] = set()
        self._next = _FOREVER  # when it looks

    def within(self, seconds: float, connection: Connection) -> None:
        """Write what `connection` holds back, if nothing else does in that time."""
        self._holding.add(connection)
        self._look_by(time.monotonic() + seconds)

    def _look_by(self, due: float) -> None:
        if due < self._next:
            self._next = due
            self._timer.at(due, self._flush)

    def _flush(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return  # a look that was asked for before an earlier one was
        self._next = _FOREVER  # before taking: who adds one from here on sees to its own look
        if not self._holding:
            return
        while self._holding:
            connection = self._holding.pop()
            try:
                connection.flush(deadline=now)
                connection.after_hold()
            except (OSError, ValueError):
                log.debug("a connection closed before what it held back was written")
        self._look_by(now + LAZY)
