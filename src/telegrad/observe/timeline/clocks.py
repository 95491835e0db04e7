"""The clocks of workers, as offsets from one of them. Pure.

Nothing arrives before it was sent: each message from `a` to `b` bounds how far `b`'s clock can be ahead of `a`'s. Pings
give both bounds, and every call that was recorded gives two more. All offsets that keep every bound form a convex set;
shortest paths give its upper and its lower end for each worker, and the point halfway keeps all bounds as well. Half
the distance between the ends is the error.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

Bounds = dict[tuple[int, int], float]  # of (a, b): how far b's clock can be ahead of a's


class Ping(NamedTuple):
    """One question for the time: when it left, what the other's clock said, when the answer came."""

    left: float
    clock: float
    came: float


class Offset(NamedTuple):
    """How far a worker's clock is ahead of the reference, and how far off that may be, in seconds."""

    ahead: float
    error: float


def tighten(bounds: Bounds, sender: int, receiver: int, sent: float, received: float) -> None:
    """A message left `sender` at `sent` of its clock, and was at `receiver` by `received` of its own."""
    key = (sender, receiver)
    limit = received - sent
    if limit < bounds.get(key, float("inf")):
        bounds[key] = limit


def align(reference: int, pings: Mapping[int, Iterable[Ping]], bounds: Bounds | None = None) -> dict[int, Offset]:
    """The offset of each worker's clock. Workers without pings get one from the messages they exchanged, if any."""
    limits = dict(bounds or {})
    for worker, answers in pings.items():
        for ping in answers:
            tighten(limits, reference, worker, ping.left, ping.clock)
            tighten(limits, worker, reference, ping.clock, ping.came)
    upper = _shortest(reference, limits)
    lower = _shortest(reference, {(b, a): limit for (a, b), limit in limits.items()})
    if upper is None or lower is None:  # no offsets keep all bounds: a clock ran faster or slower meanwhile
        return {reference: Offset(0.0, 0.0), **{worker: _by_best(answers) for worker, answers in pings.items()}}
    return {
        worker: Offset((most - lower[worker]) / 2, (most + lower[worker]) / 2)
        for worker, most in upper.items()
        if worker in lower
    }


def _shortest(start: int, limits: Bounds) -> dict[int, float] | None:
    """Distances from `start` (Bellman and Ford); None if a cycle is negative."""
    distances = {start: 0.0}
    for _ in range(len(limits) + 1):
        changed = False
        for (a, b), limit in limits.items():
            if a in distances and distances[a] + limit < distances.get(b, float("inf")) - 1e-12:
                distances[b] = distances[a] + limit
                changed = True
        if not changed:
            return distances
        if distances[start] < -1e-9:
            return None
    return None


def _by_best(answers: Iterable[Ping]) -> Offset:
    best = min(answers, key=lambda ping: ping.came - ping.left)
    return Offset(best.clock - (best.left + best.came) / 2, (best.came - best.left) / 2)
