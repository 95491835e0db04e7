"""What a connection holds back to share a write is written with the next message, or by the delayed flush in time."""

import logging
import time

from telegrad.rpc.threads.timer import Timer
from telegrad.transport.connection import Connection

log = logging.getLogger("telegrad.rpc")

LAZY = 0.005  # for what nobody waits for; each use of the timer wakes a thread, so not more often than this
BURST = 0.001  # for calls in a burst, whose replies usually write them sooner

_FOREVER = float("inf")


class DelayedFlush:
    """Sees that nothing is held back for long. Called by many threads; a race costs one more look of the timer."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._due: dict[Connection, float] = {}
        self._next = _FOREVER

    def within(self, seconds: float, connection: Connection) -> None:
        """Write what `connection` holds back, if nothing else does in that time."""
        due = time.monotonic() + seconds
        if self._due.get(connection, _FOREVER) <= due:
            return
        self._due[connection] = due
        if due < self._next:
            self._next = due
            self._timer.at(due, self._flush)

    def _flush(self) -> None:
        now = time.monotonic()
        self._next = _FOREVER
        for connection, due in list(self._due.items()):
            if due > now:
                self._next = min(self._next, due)
                continue
            self._due.pop(connection, None)
            try:
                connection.flush(deadline=now)
                connection.after_hold()
            except (OSError, ValueError):
                log.debug("a connection closed before what it held back was written")
        if self._next < _FOREVER:
            self._timer.at(self._next, self._flush)
