"""Tensor bytes between the GPU and host memory, for messages that cannot stay on the GPU.

Host memory that tensors travel in is pooled and used again, so it is pinned where that pays, once for its lifetime:
the GPU then reads and writes it directly. Where bytes go into a socket they come down in chunks through a few pinned
buffers, so that the next chunk is on its way while one is being written. Where several threads write parts of a tensor,
one of them sees to the first chunks of all (`bring_down`): at the same time they would wait for each other, within
calls of CUDA and for the interpreter, much longer than for the GPU.
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
from telegrad.cuda.runtime import CudaError, runtime

log = logging.getLogger("telegrad.cuda")

CHUNKED_FROM = 4 * 2**20  # bytes that come down while they are written
_FIRST_CHUNK = 2 * 2**20  # of threads that write parts of one tensor the first chunks come down one after the other
_EVENT_EVERY = 4 * 2**20  # bytes that are enqueued together; a thread that begins finds its first chunk there
_CHUNK = 8 * 2**20  # few, because threads wait for each other within calls of CUDA; a GPU is far ahead of any socket
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
            bring_down([self], ahead=1)
        assert self._descent is not None
        descent, self._descent = self._descent, None
        return descent.chunks()


def bring_down(several: Sequence[DeviceBytes], ahead: int = 2) -> None:
    """Have so many chunks `ahead` of each of these, which are on one device, on their way: all first ones, in the order
    given, then the next."""
    plans = [_plan(len(data)) for data in several]
    buffer = _Buffer(sum([plan.first + plan.second for plan in plans]))
    place = 0
    descents = []
    for data, plan in zip(several, plans, strict=True):
        descents.append(data.descend(plan, buffer, place))
        place += plan.first + plan.second
    while ahead and descents:
        _enqueue(descents, several[0].device)
        descents = [descent for descent in descents if descent.to_come]
        ahead -= 1


class _Plan(NamedTuple):
    """How some bytes come down: to two places in turn, which have room for `first` and `second` bytes."""

    chunks: Sequence[tuple[int, int]]
    first: int
    second: int


@functools.lru_cache(maxsize=64)
def _plan(nbytes: int) -> _Plan:
    chunks = cut_in_chunks(nbytes)
    lengths = [length for _, length in chunks]
    return _Plan(chunks, max(lengths[::2]), max(lengths[1::2], default=0))


class _Buffer:
    """Pinned memory that chunks come to."""

    __slots__ = ("_memory", "address", "view")

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.address = self._memory.data_ptr()
        self.view = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")


class _Descent:
    """Some bytes on their way down, at most two chunks at a time, each in a place of its own."""

    __slots__ = ("_kept", "_places", "address", "buffer", "coming", "stream", "to_come")

    def __init__(
        self, address: int, stream: torch.cuda.Stream, plan: _Plan, buffer: _Buffer, place: int, kept: object
    ) -> None:
        self.address = address
        self.stream = stream
        self.buffer = buffer
        self.to_come = deque(plan.chunks)
        self.coming: deque[tuple[memoryview, torch.cuda.Event]] = deque()  # the second says that the first is there
        self._places = place, place + plan.first
        self._kept = kept  # the memory on the GPU

    def next_place(self) -> int:
        """Where in the buffer the next chunk comes; after that it is the other one's turn."""
        place, self._places = self._places[0], self._places[::-1]
        return place

    def chunks(self) -> Iterator[memoryview]:
        """What comes, in order."""
        while self.coming:
            chunk, there = self.coming[0]
            if not there.query():  # type: ignore[no-untyped-call] # keeps the interpreter, which waiting does not
                there.synchronize()
            if self.to_come and len(self.coming) == 1:
                _enqueue([self], self.stream.device_index)  # comes while this one is written
            yield chunk
            del self.coming[0]

    def __del__(self) -> None:
        """If it was given up: the buffer is not used again before what was enqueued is there."""
        for _, there in self.coming:
            there.synchronize()


def _enqueue(descents: Sequence[_Descent], device: int) -> None:
    """Have the next chunk of each of these come, after one stream, and an event say so now and then."""
    stream = descents[0].stream
    raw = stream.cuda_stream
    event, since = torch.cuda.Event(), 0  # type: ignore[no-untyped-call] # of torch's
    with on_device(device):
        try:
            for descent in descents:
                if since >= _EVENT_EVERY:
                    event.record(stream)
                    event, since = torch.cuda.Event(), 0  # type: ignore[no-untyped-call]
                offset, length = descent.to_come.popleft()
                place, buffer = descent.next_place(), descent.buffer
                descent.coming.append((buffer.view[place : place + length], event))
                runtime().copy_pinned(buffer.address + place, descent.address + offset, length, raw)
                since += length
        finally:
            event.record(stream)


def cut_in_chunks(nbytes: int) -> list[tuple[int, int]]:
    """Offset and length of each chunk of so many bytes. The first is small, so that writing begins early."""
    bounds = [0, *range(min(_FIRST_CHUNK, nbytes), nbytes, _CHUNK), nbytes]
    return [(start, stop - start) for start, stop in itertools.pairwise(bounds)]
