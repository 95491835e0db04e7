"""How the tensor bytes of one large frame are divided among several streams between the same two workers.

Each stream carries one part of equal size, in the order of the streams; the first is the one that the frame itself is
on. Both ends know the sizes from the frame's header, so a part needs no header of its own, and since each stream keeps
the order of frames, nothing has to say which frame a part belongs to.
"""

from collections.abc import Iterable
from typing import Any

STRIPE_FROM = 2 * 2**20  # bytes of tensors in a frame; below, waking the threads costs as much as they save
MOST_STREAMS = 16  # so that the part on the first stream is larger than what a reader takes in at once
_ALIGNMENT = 4096


def part_bytes(total: int, streams: int) -> int:
    """The size of each part but the last, which is what remains."""
    return -(-total // (streams * _ALIGNMENT)) * _ALIGNMENT


def cut(buffers: Iterable[Any], total: int, streams: int) -> list[list[Any]]:
    """What each stream has to carry of `buffers`, which have `total` bytes together.

    A buffer is bytes-like, or has a method `part(start, stop)`, as memory on a GPU does."""
    size = part_bytes(total, streams)
    parts: list[list[Any]] = [[] for _ in range(streams)]
    at = 0
    for buffer in buffers:
        length = len(buffer)
        take = getattr(buffer, "part", None) or _slices(buffer)
        start = 0
        while start < length:
            index, within = divmod(at, size)
            stop = min(length, start + size - within)
            parts[index].append(take(start, stop))
            at += stop - start
            start = stop
    return parts


def _slices(buffer: Any) -> Any:
    view = memoryview(buffer).cast("B")
    return lambda start, stop: view[start:stop]
