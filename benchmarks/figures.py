"""Pure: from samples to the figures of the table. A cost is always seconds per operation, lower is better."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median and the range it moved in from round to round."""

    median: float
    low: float
    high: float


def cost(rounds: Sequence[Sequence[float]], operations: int) -> Spread:
    """Seconds per operation: the median over all samples, and the lowest and highest median of a round."""
    by_round = [statistics.median(samples) / operations for samples in rounds]
    everything = [sample / operations for samples in rounds for sample in samples]
    return Spread(statistics.median(everything), min(by_round), max(by_round))


def speed_up(theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> Spread:
    """How many times faster ours is: ratio of medians, and the lowest and highest ratio within one round."""
    by_round = [statistics.median(their) / statistics.median(our) for their, our in zip(theirs, ours, strict=False)]
    ratio = cost(theirs, 1).median / cost(ours, 1).median
    return Spread(ratio, min(by_round), max(by_round))


# What a cost in seconds is multiplied by, for units where less is better.
_SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0, "MB": 1.0, "us/call": 1e6}


def shown(value: float, unit: str) -> str:
    """A cost in the unit people read: `123 us`, `4,560 calls/s`."""
    number = value * _SCALES[unit] if unit in _SCALES else 1.0 / value
    digits = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{digits}f} {unit}"
