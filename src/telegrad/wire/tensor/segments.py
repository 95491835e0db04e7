"""Which bytes of memory travel for a set of tensors. Nothing is copied that can be sent from where it lies.

Tensors that share a storage travel as one segment: the byte range that covers them, so that they share memory again on
arrival. Where that range is mostly bytes nobody asked for (a column of a large matrix) and the tensors do not overlap,
each travels alone, as a compact copy if it is itself spread out.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from telegrad.cuda import order
from telegrad.wire.tensor.specs import PACKED_DTYPES

# A range may hold this many times the bytes its tensors cover before copying them out becomes the cheaper way.
_WASTE_LIMIT = 2
# Fewer bytes than this are not worth a copy, so a small tensor arrives with the strides it had.
_SMALL_WASTE = 1024
# A dtype to carry the bits of any other of that size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


HOST = -1


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Memory to be sent: `nbytes` at `address`, valid as long as `owner` is alive.

    `spare` says that nobody here looks at it any more: if it came from where it goes, it need not be copied. `device`
    is the number of the GPU whose memory it is, or HOST.
    """

    address: int
    nbytes: int
    owner: object
    spare: bool = False
    device: int = HOST


def segment_view(segment: Segment) -> memoryview:
    """The segment as a flat buffer, without copying. The view keeps the owner alive."""
    if not segment.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * segment.nbytes).from_address(segment.address)
    array.owner = segment.owner  # type: ignore[attr-defined] # torch declares no type for it
    return memoryview(array).cast("B")


def segment_bytes(segment: Segment) -> bytes:
    """A copy of the segment; cheaper than a view for small ones."""
    return ctypes.string_at(segment.address, segment.nbytes)


class Location(NamedTuple):
    """Where in its segment one tensor lies: `offset` and `strides` count elements."""

    position: int
    offset: int
    strides: tuple[int, ...]


class _Extent(NamedTuple):
    """One tensor and the bytes `low` to `high` of its storage that it can reach."""

    position: int
    tensor: Tensor
    low: int
    high: int

    @property
    def held(self) -> int:
        """How many different bytes it shows, if it does not overlap itself."""
        distinct = (size for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True) if stride)
        return math.prod(distinct) * self.tensor.itemsize


def element_span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to one past the last that this shape reaches; 0 if it has no element."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides torch gives a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def cover_storage(tensors: Sequence[Tensor]) -> Iterator[tuple[Segment, list[Location]]]:
    """Choose the segments for tensors that all have elements and all lie in one storage, on any device but meta."""
    extents = sorted((_extent(position, tensor) for position, tensor in enumerate(tensors)), key=lambda e: e.low)
    if _is_dense_enough(extents):
        yield _shared(extents)
        return
    for cluster in _clusters(extents):
        if len(cluster) > 1 and (_is_dense_enough(cluster) or not _are_disjoint(cluster)):
            yield _shared(cluster)
        else:
            for extent in cluster:
                yield _alone(extent)


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """The positions of those that have bytes in common with another; all have elements and lie in one storage."""
    extents = sorted((_extent(position, tensor) for position, tensor in enumerate(tensors)), key=lambda e: e.low)
    clusters = [cluster for cluster in _clusters(extents) if len(cluster) > 1 and not _are_disjoint(cluster)]
    return {extent.position for cluster in clusters for extent in cluster}


def _extent(position: int, tensor: Tensor) -> _Extent:
    if tensor.dtype in PACKED_DTYPES:  # torch gives these no meaningful strides: the whole storage is the tensor
        return _Extent(position, tensor, 0, tensor.untyped_storage().nbytes())
    low = int(tensor.storage_offset()) * tensor.itemsize
    return _Extent(position, tensor, low, low + element_span(tensor.shape, tensor.stride()) * tensor.itemsize)


def _is_dense_enough(extents: Sequence[_Extent]) -> bool:
    covered = max(e.high for e in extents) - extents[0].low
    held = sum(e.held for e in extents)
    return covered <= max(_WASTE_LIMIT * held, held + _SMALL_WASTE)


def _clusters(extents: Sequence[_Extent]) -> Iterator[list[_Extent]]:
    """Split into runs whose byte ranges touch; tensors of different runs cannot overlap."""
    cluster: list[_Extent] = []
    high = 0
    for extent in extents:
        if cluster and extent.low >= high:
            yield cluster
            cluster = []
        cluster.append(extent)
        high = max(high, extent.high)
    yield cluster


def _are_disjoint(cluster: Sequence[_Extent]) -> bool:
    """Whether no byte belongs to two of the tensors, decided by marking their elements. A doubt counts as no."""
    itemsize = cluster[0].tensor.itemsize
    low = cluster[0].low
    if any(e.tensor.itemsize != itemsize or (e.low - low) % itemsize for e in cluster):
        return False
    marks = torch.zeros((max(e.high for e in cluster) - low) // itemsize, dtype=torch.bool)
    for extent in cluster:
        shape, strides = _without_repeats(extent.tensor)
        seen = marks.as_strided(shape, strides, (extent.low - low) // itemsize)
        if not _visits_once(shape, strides) or bool(seen.any()):
            return False
        seen.fill_(True)
    return True


def _without_repeats(tensor: Tensor) -> tuple[list[int], tuple[int, ...]]:
    """Shape and strides with every expanded dimension cut to one."""
    strides = tensor.stride()
    return [size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True)], strides


def _visits_once(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether it is certain that no element is reached by two indices."""
    reached = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= reached:
            return False
        reached += stride * (size - 1)
    return True


def _shared(extents: Sequence[_Extent]) -> tuple[Segment, list[Location]]:
    """One segment over all of them, aligned so that each tensor starts at a whole element of its own dtype."""
    first = extents[0].tensor
    low = extents[0].low
    low -= low % max(e.tensor.itemsize for e in extents)
    high = max(e.high for e in extents)
    placements = [Location(e.position, (e.low - low) // e.tensor.itemsize, e.tensor.stride()) for e in extents]
    storage = first.untyped_storage()
    if first.is_cpu:
        return Segment(storage.data_ptr() + low, high - low, storage), placements
    if first.is_cuda:
        device = first.get_device()
        order.use(device)
        return Segment(storage.data_ptr() + low, high - low, storage, False, device), placements
    on_device = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, low, (high - low,), (1,))
    on_host = on_device.cpu()
    return Segment(on_host.data_ptr(), on_host.nbytes, on_host), placements


def _alone(extent: _Extent) -> tuple[Segment, list[Location]]:
    """The tensor's own range, or a compact copy of it where that range holds mostly other bytes."""
    shape, strides = _without_repeats(extent.tensor)
    if _is_dense_enough([extent]) or not _visits_once(shape, strides):
        return _shared([extent])
    # Copied as plain bits: some dtypes have no copy of their own, and a lazy conjugate must stay lazy.
    bits = torch.empty(0, dtype=_BITS[extent.tensor.itemsize], device=extent.tensor.device)
    bits.set_(extent.tensor.untyped_storage(), extent.tensor.storage_offset(), shape, strides)
    compact = bits.clone()
    placed = tuple(new if old else 0 for new, old in zip(compact.stride(), strides, strict=True))
    segment, _ = _shared([_extent(0, compact)])
    return segment, [Location(extent.position, 0, placed)]
