"""What a connection holds back to share a write is written with the next message, or by the delayed flush in time."""

import functools
import time

from telegrad.rpc.threads.timer import Timer
from telegrad.transport.connection import Connection

# For what nobody waits for, which usually leaves much sooner, with the next message. Each look takes the interpreter
# from a worker that sends such a message with every step: at 5 ms that cost a step of 0.5 ms 5% of its time.
LAZY = 0.05
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

    def look_after(self, connection: Connection) -> None:
        """Let a connection ask for it."""
        connection.flush_within = functools.partial(self.within, connection)

    def within(self, connection: Connection, seconds: float) -> None:
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
        found = list(self._holding)
        for connection in found:
            self._holding.discard(connection)  # before: if its peer has no room, it asks again
            connection.before_flush()
            connection.flush()
            connection.after_hold()
        if in_time and found:
            self._look_at(now + LAZY)
