"""How the tensor bytes of one large frame are divided among several streams between the same two workers.

Each stream carries one part, in the order of the streams; the first is the one that the frame itself is on. A frame
that is not that large leaves nothing for the last of many streams. Both ends know the sizes from the frame's header, so
a part needs no header of its own, and since each stream keeps the order of frames, nothing has to say which frame a
part belongs to.
"""

from collections.abc import Iterable, Sequence
from typing import Any

STRIPE_FROM = 2 * 2**20  # bytes of tensors in a frame; below, waking the threads costs as much as they save
MOST_STREAMS = 16  # so that the part on the first stream is larger than what a reader takes in at once
LEAST_PART = 512 * 1024  # bytes: for less it does not pay to wake a thread on either side
LEAST_FIRST = 128 * 1024  # bytes on the first stream where it should carry as little as it can, for the same reason
_ALIGNMENT = 4096


def divide(total: int, streams: int, first: int | None = None) -> list[int]:
    """Where the parts of so many bytes begin, and the end: equal ones, but for the first if its size is given, and for
    the last ones, which are empty where the others are as small as a part may be."""
    begin = 0 if first is None else first
    others = streams if first is None else streams - 1
    size = max(LEAST_PART, -(-(total - begin) // (others * _ALIGNMENT)) * _ALIGNMENT)
    bounds = [] if first is None else [0]
    return bounds + [min(total, begin + i * size) for i in range(others)] + [total]


def cut(buffers: Iterable[Any], bounds: Sequence[int]) -> list[list[Any]]:
    """What each stream has to carry of `buffers`, whose bytes are divided at `bounds`.

    A buffer is bytes-like, or has a method `part(start, stop)`, as memory on a GPU does."""
    parts: list[list[Any]] = [[] for _ in bounds[1:]]
    at = index = 0
    for buffer in buffers:
        length = len(buffer)
        take = getattr(buffer, "part", None) or _slices(buffer)
        start = 0
        while start < length:
            while at == bounds[index + 1]:
                index += 1
            stop = min(length, start + bounds[index + 1] - at)
            parts[index].append(take(start, stop))
            at += stop - start
            start = stop
    return parts


def _slices(buffer: Any) -> Any:
    view = memoryview(buffer).cast("B")
    return lambda start, stop: view[start:stop]
