"""Tensor bytes between the GPU and host memory, for messages that cannot stay on the GPU.

Host memory that tensors travel in is pooled and used again, so it is pinned where that pays, once for its lifetime:
the GPU then reads and writes it directly. Where bytes go into a socket they come down in chunks through a few pinned
buffers, so that the next chunk is on its way while one is being written. Where several threads write parts of a tensor,
one of them sees to the first chunks of all (`bring_down`): at the same time they would wait for each other, within
calls of CUDA and for the interpreter, much longer than for the GPU. The parts lie equally far from each other, so that
one call has a piece of all of them come.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from telegrad.cuda.order import current_stream
from telegrad.cuda.runtime import FARTHEST, CudaError, Rows, runtime

log = logging.getLogger("telegrad.cuda")

CHUNKED_FROM = 4 * 2**20  # bytes that come down while they are written
_CHUNK = 8 * 2**20  # bytes; few chunks, because threads wait for each other within calls of CUDA
_PIECES = 2, 8  # sixteenths of the first chunk, where it is cut: a GPU is far ahead of any socket
_PIECES_FROM = 2**20  # bytes of a first chunk that comes in such pieces
_ALIGNMENT = 4096
_PIN_FROM = 2**20  # bytes; pinning less costs more than it saves

_pinning = threading.Lock()


class Mapped(Protocol):
    """Memory that is mapped into this process."""

    address: int
    size: int
    seen_at: int  # where the GPU sees it, if it is pinned

    def before_unmapping(self, act: Callable[[int], None]) -> None:
        """Call `act` with the address when nobody refers to it any more, before it is unmapped."""


def pinned(mapping: Mapped) -> int:
    """Pin mapped memory for as long as it lives; where the GPU sees it. CudaError if it cannot be."""
    with _pinning:
        if not mapping.seen_at:
            runtime().pin(mapping.address, mapping.size)
            mapping.seen_at = runtime().seen_by_device(mapping.address)
            mapping.before_unmapping(_unpin)
        return mapping.seen_at


def _unpin(address: int) -> None:
    try:
        runtime().unpin(address)
    except CudaError as error:
        log.debug("host memory could not be unpinned: %s", error)


def pin_large(mapping: Mapped) -> None:
    """Pin mapped memory if that pays. If it cannot be, copies are slower, and that is all."""
    if mapping.size >= _PIN_FROM and not mapping.seen_at:
        try:
            pinned(mapping)
        except CudaError as error:
            log.debug("host memory could not be pinned: %s", error)


def to_host(target: int, source: int, nbytes: int, device: int) -> None:
    """Copy from the GPU, after what is on the current stream; returns when the bytes are there."""
    stream = current_stream(device)
    runtime().copy(target, source, nbytes, stream)
    runtime().synchronize(stream)


def on_device(index: int) -> AbstractContextManager[object]:
    """Within, that device is the current one. Usually it is already, and torch's own way to make sure takes longer than
    to enqueue a copy."""
    return _as_it_is if torch._C._cuda_getDevice() == index else torch.cuda.device(index)


_as_it_is = nullcontext()


def bytes_of(address: int, nbytes: int, device: int) -> bytearray:
    """A copy of a few bytes on the GPU."""
    data = bytearray(nbytes)
    if nbytes:
        to_host(ctypes.addressof(ctypes.c_char.from_buffer(data)), address, nbytes, device)
    return data


def to_device(buffer: Any, device: torch.device) -> torch.UntypedStorage:
    """A storage on the GPU with the bytes of a buffer, which is free again when this returns."""
    view = memoryview(buffer).cast("B")
    storage = torch.empty(len(view), dtype=torch.uint8, device=device).untyped_storage()
    if len(view):
        mapping = getattr(view.obj, "mapping", None)
        if mapping is not None:
            pin_large(mapping)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        stream = current_stream(device.index or 0)
        runtime().copy(storage.data_ptr(), address, len(view), stream)
        runtime().synchronize(stream)
    return storage


class DeviceBytes:
    """Bytes on the GPU that are to be written to a socket, in chunks."""

    __slots__ = ("_address", "_descent", "_nbytes", "_owner", "_stream", "device")

    def __init__(
        self, address: int, nbytes: int, device: int, owner: object, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._address = address
        self._nbytes = nbytes
        self.device = device
        self._owner = owner
        self._stream = stream  # that the copies follow; None for the one of the thread that asks for them
        self._descent: _Descent | None = None

    def __len__(self) -> int:
        return self._nbytes

    def part(self, start: int, stop: int) -> DeviceBytes:
        """Some of these bytes, for another thread to write: they come after what is on this thread's stream."""
        if self._stream is None:
            self._stream = torch.cuda.current_stream(self.device)
        return DeviceBytes(self._address + start, stop - start, self.device, self._owner, self._stream)

    def descend(self, plan: _Plan, buffer: _Buffer, place: int) -> _Descent:
        """They will come down like that, to some place of a buffer."""
        stream = self._stream or torch.cuda.current_stream(self.device)
        self._descent = _Descent(self._address, stream, plan, buffer, place, self._owner)
        return self._descent

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order. Each chunk is valid until the next one is asked for."""
        if not self._nbytes:
            return iter(())
        if self._descent is None:
            bring_down([self])
        assert self._descent is not None
        descent, self._descent = self._descent, None
        return descent.chunks()


def bring_down(several: Sequence[DeviceBytes]) -> None:
    """Have as much of each of these, which are on one device, on its way as there is room for: the first piece of all,
    in the order given, then the next."""
    plans = [_plan(len(data)) for data in several]
    buffer = _Buffer(sum([plan.room for plan in plans]))
    place = 0
    descents = []
    for data, plan in zip(several, plans, strict=True):
        descents.append(data.descend(plan, buffer, place))
        place += plan.room
    for index in range(max(plan.at_first for plan in plans)):
        _enqueue([descent for descent, plan in zip(descents, plans, strict=True) if index < plan.at_first])


class _Piece(NamedTuple):
    """Some of the bytes that come down."""

    start: int
    nbytes: int
    place: int  # in the room that these bytes have in a buffer


class _Plan(NamedTuple):
    """How some bytes come down: in chunks to two places in turn, the first chunk in a few pieces."""

    pieces: Sequence[_Piece]
    at_first: int  # those for which there is room before anything is written
    room: int


@functools.lru_cache(maxsize=64)
def _plan(nbytes: int) -> _Plan:
    first = min(_CHUNK, nbytes)
    cuts = [first * sixteenths // 16 & -_ALIGNMENT for sixteenths in _PIECES] if first >= _PIECES_FROM else []
    pieces = [_Piece(start, stop - start, start) for start, stop in itertools.pairwise([0, *cuts, first])]
    at_first = len(pieces) + (nbytes > first)
    for start in range(first, nbytes, _CHUNK):
        pieces.append(_Piece(start, min(_CHUNK, nbytes - start), start % (2 * _CHUNK)))
    return _Plan(pieces, at_first, min(2 * _CHUNK, nbytes))


class _Buffer:
    """Pinned memory that chunks come to."""

    __slots__ = ("_memory", "address", "view")

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.address = self._memory.data_ptr()
        self.view = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")


class _Descent:
    """Some bytes on their way down, as much at a time as there is room for."""

    __slots__ = ("_kept", "_place", "address", "buffer", "coming", "stream", "to_come")

    def __init__(
        self, address: int, stream: torch.cuda.Stream, plan: _Plan, buffer: _Buffer, place: int, kept: object
    ) -> None:
        self.address = address
        self.stream = stream
        self.buffer = buffer
        self.to_come = deque(plan.pieces)
        self.coming: deque[tuple[memoryview, torch.cuda.Event]] = deque()  # the second says that the first is there
        self._place = place
        self._kept = kept  # the memory on the GPU

    def next_piece(self, there: torch.cuda.Event) -> Copy:
        """The next one is about to be enqueued; `there` will say that it has come."""
        piece = self.to_come.popleft()
        place = self._place + piece.place
        self.coming.append((self.buffer.view[place : place + piece.nbytes], there))
        return Copy(self.buffer.address + place, self.address + piece.start, piece.nbytes)

    def chunks(self) -> Iterator[memoryview]:
        """What comes, in order."""
        while self.coming:
            chunk, there = self.coming[0]
            if not there.query():  # type: ignore[no-untyped-call] # keeps the interpreter, which waiting does not
                there.synchronize()
            if self.to_come and len(self.coming) == 1:
                _enqueue([self])  # comes while this one is written
            yield chunk
            del self.coming[0]

    def __del__(self) -> None:
        """If it was given up: the buffer is not used again before what was enqueued is there."""
        for _, there in self.coming:
            there.synchronize()


def _enqueue(descents: Sequence[_Descent]) -> None:
    """Have the next piece of each of these come, after one stream, and an event say so."""
    stream = descents[0].stream
    event = torch.cuda.Event()  # type: ignore[no-untyped-call] # of torch's
    with on_device(stream.device_index):
        try:
            copy_together([descent.next_piece(event) for descent in descents], stream.cuda_stream)
        finally:
            event.record(stream)


class Copy(NamedTuple):
    """Bytes to be copied between the GPU and pinned memory."""

    target: int
    source: int
    nbytes: int


def copy_together(copies: Sequence[Copy], stream: int) -> None:
    """Enqueue copies, in few calls: one for all that lie equally far from each other, on either side."""
    cuda = runtime()
    start = 0
    while start < len(copies):
        target, source, nbytes = copies[start]
        stop = start + 1
        if stop < len(copies):
            far, apart = copies[stop].target - target, copies[stop].source - source
            if nbytes <= far < FARTHEST and nbytes <= apart < FARTHEST:
                while stop < len(copies) and copies[stop] == (
                    target + far * (stop - start),
                    source + apart * (stop - start),
                    nbytes,
                ):
                    stop += 1
        if stop - start > 1:
            cuda.copy_rows(Rows(target, far), Rows(source, apart), nbytes, stop - start, stream)
        else:
            cuda.copy(target, source, nbytes, stream)
        start = stop
