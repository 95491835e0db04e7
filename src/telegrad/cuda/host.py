"""Tensor bytes between the GPU and host memory, for messages that cannot stay on the GPU.

Host memory that tensors travel in is pooled and used again, so it is pinned where that pays, once for its lifetime:
the GPU then reads and writes it directly. Where bytes go into a socket they come down in chunks through a few pinned
buffers, so that the next chunk is on its way while one is being written.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from telegrad.cuda.order import current_stream
from telegrad.cuda.runtime import CudaError, runtime

log = logging.getLogger("telegrad.cuda")

CHUNK = 4 * 2**20
_FIRST_CHUNK = 2**20  # of threads that write parts of one tensor the first chunks come down one after the other
_WINDOW = 4 * CHUNK  # bytes of pinned memory for each thread that writes
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
        current = self._stream or torch.cuda.current_stream(self._device)
        buffer = torch.empty(min(_WINDOW, self._nbytes), dtype=torch.uint8, pin_memory=True)
        first = buffer.data_ptr()
        coming: deque[tuple[int, torch.cuda.Event, int]] = deque()  # where, when it is there, bytes
        taken = 0  # bytes of the buffer that hold what is coming or being written
        most = 2 * _FIRST_CHUNK  # few at first: other threads' first chunks come behind these
        try:
            for offset, length in cut_in_chunks(self._nbytes):
                # A chunk is whole within the buffer: the sizes double up to that of the last ones, which divides it.
                while taken + length > most:
                    yield _there(coming[0])
                    taken -= coming.popleft()[2]
                    most = _WINDOW
                place = first + offset % _WINDOW
                with torch.cuda.device(self._device):
                    runtime().copy(place, self._address + offset, length, current.cuda_stream)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call] # of torch's
                event.record(current)
                coming.append((place, event, length))
                taken += length
            while coming:
                yield _there(coming[0])
                coming.popleft()
        finally:
            for _, event, _ in coming:  # given up: the buffer is not used again before these are there
                event.synchronize()


def _there(chunk: tuple[int, torch.cuda.Event, int]) -> memoryview:
    """The bytes of a chunk, once they have come."""
    place, event, length = chunk
    event.synchronize()
    return memoryview((ctypes.c_char * length).from_address(place)).cast("B")


def cut_in_chunks(nbytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each chunk of so many bytes. The first are small, so that writing begins early."""
    offset = 0
    while offset < nbytes:
        length = min(CHUNK, max(_FIRST_CHUNK, offset), nbytes - offset)
        yield offset, length
        offset += length
