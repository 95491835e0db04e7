"""A thread that serves a link and is about to sleep lets go of the link first.

Requests run in the thread that read them, because handing them to another costs more than most of them take. The price
is that such a thread must not keep the link to itself while it waits. Every wait in Telegrad announces itself here; a
wait that cannot (a lock, a sleep in a user's function) is noticed by the timer after 2 to 16 ms.
"""

import threading
from typing import Protocol


class Turn(Protocol):
    """The right of one thread to serve one link."""

    owes: bool  # whether replies wait for those of the requests behind them

    @property
    def main_by_value(self) -> bool:
        """Whether what is of `__main__` must be sent whole to the caller."""

    @property
    def has_more(self) -> bool:
        """Whether more has come than the request that this thread runs."""

    def give_up(self) -> None:
        """Let another thread serve the link."""

    def sleeping(self, change: int) -> None:
        """Count this thread among those that wait (+1) or no longer (-1)."""

    def is_cancelled(self) -> bool:
        """Whether the caller of the request that this thread runs no longer waits for it."""


class _Local(threading.local):
    turn: Turn | None = None


local = _Local()


class blocking:  # noqa: N801 - used like a function; a class, because it is on the path of every wait
    """Around anything that may sleep until another worker or thread acts."""

    __slots__ = ("_turn",)

    def __enter__(self) -> None:
        self._turn = turn = local.turn
        if turn is not None:
            turn.give_up()
            turn.sleeping(+1)

    def __exit__(self, *_: object) -> None:
        if self._turn is not None:
            self._turn.sleeping(-1)
