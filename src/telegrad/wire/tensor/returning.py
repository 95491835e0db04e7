"""Which memory of a reply came with its request and is held by nobody else: it can go back instead of being copied.

A function that returns what it was given, changed in place or not, and a gradient that passes through an addition are
such cases. All doubt counts against: a tensor that the function also kept somewhere, a view of it, an array of another
library that shares its memory, or an operation that saved it for a backward pass each hold a reference that is counted.
"""

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from telegrad.wire.tensor.segments import Segment

WORTHWHILE = 32 * 1024  # bytes of one tensor; looking costs as much as copying fewer


def storages_of(tensors: Sequence[Tensor]) -> frozenset[int]:
    """The identities of the storages that came with a request, those large enough to be worth a look."""
    plain = [tensor for tensor in tensors if tensor.is_cpu and tensor.layout is torch.strided]  # others have none
    return frozenset([tensor.untyped_storage()._cdata for tensor in plain if tensor.nbytes >= WORTHWHILE])


def mark_spare(tensors: Sequence[Tensor], segments: Sequence[Segment], came: frozenset[int]) -> list[Segment]:
    """The segments of a reply's tensors, with those marked that came with the request and belong to nobody else.

    `tensors` must be the only list that holds them, apart from the segments.
    """
    marked = list(segments)
    for index in range(min(len(tensors), len(marked))):
        segment = marked[index]
        if (
            segment.nbytes >= WORTHWHILE
            and segment.owner is tensors[index]
            and tensors[index].untyped_storage()._cdata in came
            and _holders(tensors, index) == _NOBODY_ELSE
        ):
            marked[index] = Segment(segment.address, segment.nbytes, segment.owner, True)
    return marked


def _holders(tensors: Sequence[Tensor], index: int) -> tuple[int, ...]:
    """Who holds a tensor and its storage: in Python, and in torch itself, where a node may have saved it."""
    storage = [tensors[index].untyped_storage()]  # in a list, not a variable: some versions do not count those
    return (
        sys.getrefcount(tensors[index]),
        weakref.getweakrefcount(tensors[index]),
        tensors[index]._use_count(),  # type: ignore[attr-defined] # torch declares no type for it
        sys.getrefcount(storage[0]),
        torch._C._storage_Use_Count(storage[0]._cdata),
    )


_probe = [torch.empty(1)]
_probe_segment = Segment(0, 0, _probe[0])
_NOBODY_ELSE = _holders(_probe, 0)  # counted for one that is certainly alone: versions of Python and torch differ
