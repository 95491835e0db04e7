"""A thread that serves a link and is about to sleep lets go of the link first.

Requests run in the thread that read them, because handing them to another costs more than most of them take. The price
is that such a thread must not keep the link to itself while it waits. Every wait in Telegrad announces itself here; a
wait that cannot (a lock, a sleep in a user's function) is noticed by the keeper within a few milliseconds.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Turn(Protocol):
    """The right of one thread to serve one link."""

    def give_up(self) -> None:
        """Let another thread serve the link."""

    def sleeping(self, change: int) -> None:
        """Count this thread among those that wait (+1) or no longer (-1)."""


class _Local(threading.local):
    turn: Turn | None = None


local = _Local()


@contextmanager
def blocking() -> Iterator[None]:
    """Around anything that may sleep until another worker or thread acts."""
    turn = local.turn
    if turn is None:
        yield
        return
    turn.give_up()
    turn.sleeping(+1)
    try:
        yield
    finally:
        turn.sleeping(-1)
