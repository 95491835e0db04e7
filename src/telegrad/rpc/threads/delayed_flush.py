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
        due = time.monotonic() + seconds
        if due < self._next:
            self._look_at(due)

    def _look_at(self, due: float) -> None:
        self._next = due
        self._timer.at(due, self._flush)

    def _flush(self) -> None:
        now = time.monotonic()
        in_time = now >= self._next  # else it was asked for before an earlier look was, which sees to what follows
        if in_time:
            self._next = _FOREVER  # before taking: who adds one from here on sees to its own look
        found = bool(self._holding)
        busy: list[Connection] = []
        while self._holding:
            connection = self._holding.pop()
            try:
                connection.flush(deadline=now)
                connection.after_hold()
            except TimeoutError:  # another thread is writing, what it began before: at the next look again
                if not connection.closed:
                    busy.append(connection)
            except (OSError, ValueError):
                log.debug("a connection closed before what it held back was written")
        self._holding.update(busy)
        if in_time and found:
            self._look_at(now + LAZY)
