"""Tensor bytes between the GPU and host memory, for messages that cannot stay on the GPU.

Host memory that tensors travel in is pooled and used again, so it is pinned where that pays, once for its lifetime:
the GPU then reads and writes it directly. Where bytes go into a socket they come down in chunks through a few pinned
buffers, so that the next chunk is on its way while one is being written.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from telegrad.cuda.order import current_stream
from telegrad.cuda.runtime import CudaError, runtime

log = logging.getLogger("telegrad.cuda")

CHUNKED_FROM = 4 * 2**20  # bytes that come down while they are written
_FIRST_CHUNK = 2 * 2**20  # of threads that write parts of one tensor the first chunks come down one after the other
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

    __slots__ = ("_address", "_device", "_nbytes", "_owner", "_stream")

    def __init__(
        self, address: int, nbytes: int, device: int, owner: object, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._address = address
        self._nbytes = nbytes
        self._device = device
        self._owner = owner
        self._stream = stream  # that the copies follow; None for the one of the thread that asks for them

    def __len__(self) -> int:
        return self._nbytes

    def part(self, start: int, stop: int) -> DeviceBytes:
        """Some of these bytes, for another thread to write: they come after what is on this thread's stream."""
        stream = self._stream or torch.cuda.current_stream(self._device)
        return DeviceBytes(self._address + start, stop - start, self._device, self._owner, stream)

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order. Each chunk is valid until the next one is asked for."""
        if not self._nbytes:
            return
        current = self._stream or torch.cuda.current_stream(self._device)
        chunks = cut_in_chunks(self._nbytes)
        lengths = [length for _, length in chunks]
        second = max(lengths[::2])  # where the second one lies, and every other one after it
        buffer = torch.empty(second + max(lengths[1::2], default=0), dtype=torch.uint8, pin_memory=True)
        coming: list[_Chunk] = []

        def begin(index: int) -> None:
            offset, length = chunks[index]
            place = buffer.data_ptr() + (second if index % 2 else 0)
            with torch.cuda.device(self._device):
                runtime().copy(place, self._address + offset, length, current.cuda_stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # of torch's
            event.record(current)
            coming.append(_Chunk(place, length, event))

        try:
            begin(0)
            for following in range(1, len(chunks) + 1):
                coming[0].there.synchronize()
                if following < len(chunks):
                    begin(following)  # comes while this one is written; not before: other threads wait for their first
                yield coming[0].view()
                del coming[0]
        finally:
            for chunk in coming:  # given up: the buffer is not used again before these are there
                chunk.there.synchronize()


class _Chunk(NamedTuple):
    """Bytes that come down."""

    place: int
    length: int
    there: torch.cuda.Event

    def view(self) -> memoryview:
        """Those bytes, once they are there."""
        return memoryview((ctypes.c_char * self.length).from_address(self.place)).cast("B")


def cut_in_chunks(nbytes: int) -> list[tuple[int, int]]:
    """Offset and length of each chunk of so many bytes. The first is small, so that writing begins early."""
    bounds = [0, *range(min(_FIRST_CHUNK, nbytes), nbytes, _CHUNK), nbytes]
    return [(start, stop - start) for start, stop in itertools.pairwise(bounds)]
