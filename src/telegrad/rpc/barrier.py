"""Barriers: the worker with the lowest id keeps the book of who has arrived, and answers when all have.

Pure: it is told of arrivals and of deaths, and says which barriers are complete. A worker that dies is no longer
expected, so it holds nobody up.
"""

from collections.abc import Callable, Iterable

Answer = Callable[[int], None]  # called with the sum of all activities


class Book:
    """Arrivals at the barriers this worker keeps."""

    def __init__(self) -> None:
        self._arrived: dict[str, dict[str, tuple[int, Answer]]] = {}

    def arrive(self, key: str, worker: str, activity: int, answer: Answer) -> None:
        """A worker reached a barrier; a second arrival of the same one replaces the first."""
        self._arrived.setdefault(key, {})[worker] = (activity, answer)

    def complete(self, expected: Iterable[str], here: str) -> list[tuple[Answer, int]]:
        """Answers to give now: of the barriers at which all those expected have arrived.

        The answer to this worker itself comes last: it may leave as soon as it has it, and must not take the answers of
        the others with it."""
        wanted = set(expected)
        ready: list[tuple[Answer, int]] = []
        for key in [k for k, arrived in self._arrived.items() if wanted <= arrived.keys()]:
            arrived = self._arrived.pop(key)
            total = sum(activity for activity, _ in arrived.values())
            in_order = sorted(arrived, key=lambda worker: worker == here)
            ready += [(arrived[worker][1], total) for worker in in_order]
        return ready

    def missing(self, key: str, expected: Iterable[str]) -> list[str]:
        """Who has not reached a barrier."""
        return sorted(set(expected) - self._arrived.get(key, {}).keys())
