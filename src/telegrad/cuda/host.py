"""Tensor bytes between the GPU and host memory, for messages that cannot stay on the GPU.

Host memory that tensors travel in is pooled and used again, so it is pinned where that pays, once for its lifetime:
the GPU then reads and writes it directly. Where bytes go into a socket they come down in chunks through a few pinned
buffers, so that the next chunk is on its way while one is being written.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from telegrad.cuda.runtime import CudaError, runtime

CHUNK = 4 * 2**20
_AHEAD = 3  # chunks on their way while one is being written
_PIN_FROM = 2**20  # bytes; pinning less costs more than it saves

_pinned: dict[int, int] = {}  # mappings that are pinned, by address: their size


def pin(mapping: Any) -> None:
    """Pin mapped memory, an object with `address` and `size`, for as long as it lives. Does nothing if it cannot be."""
    address, size = mapping.address, mapping.size
    if size < _PIN_FROM or address in _pinned:
        return
    try:
        runtime().pin(address, size)
    except CudaError:  # no more memory may be pinned: copies are slower, and that is all
        return
    _pinned[address] = size
    # Called before the mapping's own finalizer, which was registered earlier: unpinned, then unmapped.
    weakref.finalize(mapping, _unpin, address).atexit = False


def _unpin(address: int) -> None:
    _pinned.pop(address, None)
    try:
        runtime().unpin(address)
    except CudaError:
        pass  # the process is ending


def to_host(target: int, source: int, nbytes: int, device: int) -> None:
    """Copy from the GPU, after what is on the current stream; returns when the bytes are there."""
    stream = torch.cuda.current_stream(device).cuda_stream
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
            pin(mapping)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        stream = torch.cuda.current_stream(device).cuda_stream
        runtime().copy(storage.data_ptr(), address, len(view), stream)
        runtime().synchronize(stream)
    return storage


class DeviceBytes:
    """Bytes on the GPU that are to be written to a socket, in chunks."""

    __slots__ = ("_address", "_device", "_nbytes", "_owner")

    def __init__(self, address: int, nbytes: int, device: int, owner: object) -> None:
        self._address = address
        self._nbytes = nbytes
        self._device = device
        self._owner = owner

    def __len__(self) -> int:
        return self._nbytes

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order. Each chunk is valid until the next one is asked for."""
        current = torch.cuda.current_stream(self._device)
        offsets = iter(range(0, self._nbytes, CHUNK))
        size = min(CHUNK, self._nbytes)
        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(_AHEAD + 1)]
        events = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call] # of torch's
        started: list[tuple[int, int]] = []  # place among the buffers, bytes
        place = 0

        def start_next() -> None:
            nonlocal place
            offset = next(offsets, None)
            if offset is not None:
                length = min(CHUNK, self._nbytes - offset)
                runtime().copy(buffers[place].data_ptr(), self._address + offset, length, current.cuda_stream)
                events[place].record(current)
                started.append((place, length))
                place = (place + 1) % len(buffers)

        for _ in range(_AHEAD):
            start_next()
        while started:
            index, length = started.pop(0)
            start_next()
            events[index].synchronize()
            view = (ctypes.c_char * length).from_address(buffers[index].data_ptr())
            yield memoryview(view).cast("B")
