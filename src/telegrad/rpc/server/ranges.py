"""A set of numbers that are mostly neighbours, kept as ranges: a million in a row take as much room as one.

A session remembers so which requests it must not run again. They are numbered one after the other, and all but the few
that still run are done.
"""

from bisect import bisect_right


class Ranges:
    """Numbers in ascending ranges that neither touch nor overlap. Not for several threads at once."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # one beyond the last of each range

    def __repr__(self) -> str:
        return f"<Ranges {', '.join(f'{s}-{e - 1}' for s, e in zip(self._starts, self._ends, strict=True))}>"

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    @property
    def count(self) -> int:
        """How many ranges there are, which is what they cost."""
        return len(self._starts)

    def add(self, number: int) -> None:
        """Put in one number; ranges that meet there become one."""
        starts, ends = self._starts, self._ends
        after = bisect_right(starts, number)  # the first range that begins beyond it
        if after and number < ends[after - 1]:
            return
        joins_before = after > 0 and ends[after - 1] == number
        joins_after = after < len(starts) and starts[after] == number + 1
        if joins_before and joins_after:
            ends[after - 1] = ends[after]
            del starts[after], ends[after]
        elif joins_before:
            ends[after - 1] = number + 1
        elif joins_after:
            starts[after] = number
        else:
            starts.insert(after, number)
            ends.insert(after, number + 1)

    def drop_below(self, limit: int) -> None:
        """Take out all numbers below `limit`."""
        gone = bisect_right(self._ends, limit)
        del self._starts[:gone], self._ends[:gone]
        if self._starts and self._starts[0] < limit:
            self._starts[0] = limit
