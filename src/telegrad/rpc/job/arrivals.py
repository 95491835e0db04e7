"""Barriers: the worker with the lowest id coordinates: it notes who has arrived, and answers when all have.

Pure: it is told of arrivals and of deaths, and says which barriers are complete. A worker that dies is no longer
expected, so it holds nobody up; nor has it arrived for the one that is started again under its name.

Barriers come in rounds, "name/0", "name/1" and so on to "name/left" and "name/closed". The coordinator itself may die
when some have its answer and others have not: those are a round ahead when the next one begins, so whoever has reached
a later round counts as having reached the earlier ones.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from telegrad.errors import ProtocolError

Answer = Callable[[int], None]  # called with the sum of all activities

_NUMBER = re.compile(r"[0-9]{1,15}")
_MOST_OPEN = 256
_MOST_ACTIVITY = 2**53  # calls of one worker in all; what is beyond would not fit an answer when it is added up
_LAST_ROUNDS = {"left": 1e18, "closed": 2e18}


class Arrival(NamedTuple):
    """One worker at a barrier."""

    incarnation: int
    activity: int  # calls made and served
    answer: Answer


class Arrivals:
    """Arrivals at the barriers that this worker coordinates."""

    def __init__(self) -> None:
        self._arrived: dict[str, dict[str, Arrival]] = {}

    def arrive(self, key: str, worker: str, arrival: Arrival) -> None:
        """A worker reached a barrier; a second arrival of the same one replaces the first. ProtocolError for what is
        no barrier, before anything is noted."""
        _round_of(key)
        if not 0 <= arrival.activity <= _MOST_ACTIVITY:
            raise ProtocolError(f"no worker has made and served {arrival.activity} calls")
        if key not in self._arrived and len(self._arrived) >= _MOST_OPEN:
            raise ProtocolError(f"more than {_MOST_OPEN} barriers are open at a time")
        self._arrived.setdefault(key, {})[worker] = arrival

    def lose(self, worker: str, incarnation: int) -> None:
        """An incarnation of a worker is gone: it is at no barrier."""
        for key, arrived in [*self._arrived.items()]:
            if worker in arrived and arrived[worker].incarnation == incarnation:
                del arrived[worker]
                if not arrived:
                    del self._arrived[key]

    def complete(self, expected: Iterable[str], here: str) -> list[tuple[Answer, int]]:
        """Answers to give now: of the barriers at which all those expected have arrived.

        The answer to this worker itself comes last: it may leave as soon as it has it, and must not take the answers of
        the others with it."""
        wanted = set(expected)
        ready: list[tuple[Answer, int]] = []
        for key in [k for k in self._arrived if wanted <= self._reached(k).keys()]:
            total = sum(self._reached(key).values())
            arrived = self._arrived.pop(key)
            in_order = sorted(arrived, key=lambda worker: worker == here)
            ready += [(arrived[worker].answer, total) for worker in in_order]
        return ready

    def missing(self, key: str, expected: Iterable[str]) -> list[str]:
        """Who has not reached a barrier."""
        return sorted(set(expected) - self._reached(key).keys())

    def waiting(self) -> list[str]:
        """The barriers at which somebody waits."""
        return list(self._arrived)

    def _reached(self, key: str) -> dict[str, int]:
        """Who has reached a barrier, or a later round of it, with their activities."""
        _round_of(key)  # what is no barrier is refused, though nobody has arrived anywhere
        reached: dict[str, int] = {}
        for other, arrived in self._arrived.items():
            if is_as_far(other, key):
                reached.update({worker: arrival.activity for worker, arrival in arrived.items()})
        return reached


def is_as_far(reached: str, key: str) -> bool:
    """Whether somebody at the barrier `reached` has reached `key`: it is that one, or a later round of it."""
    (name, round_), (wanted, earliest) = _round_of(reached), _round_of(key)
    return name == wanted and round_ >= earliest


def _round_of(key: str) -> tuple[str, float]:
    name, _, round_ = key.rpartition("/")
    if _NUMBER.fullmatch(round_):
        return name, float(round_)
    if not name or round_ not in _LAST_ROUNDS:
        raise ProtocolError(f"{key[:100]!r} is not the name and round of a barrier")
    return name, _LAST_ROUNDS[round_]
