"""Blocks of device memory that tensors travel in between two workers on one host; `transport/blocks` is the model.

The sender copies tensors into a block it owns and has exported once, on its current stream, and sends the message
without waiting for the GPU (`lending.py`). The receiver's stream waits until the block is written, copies the tensors
out into memory of its own, and the block goes back (`borrowing.py`). Whoever writes to it next has its stream wait
until it was read. So nobody waits for the GPU but the GPU. Each use of a block has a number; that it was written, and
read, is a number in host memory that both processes share and both their GPUs see (`flags.py`).

A received tensor is the receiver's own memory: it outlives the sender, and torch's allocator knows it. Why not an alias
of the block, as in host memory, and why not CUDA's events, is in docs/decisions.

Small blocks share an allocation (a `Slab`), since CUDA gives out memory in pieces of 2 MB. Memory that a peer has open
must not be freed: a slab is retired, the peer closes it and says so, and then it is freed. After a lost connection the
peer cannot say so; what is left then is freed after a while (`leftovers.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import NamedTuple

import torch

from telegrad.cuda.copy_kernel import give_back_counter, take_counter
from telegrad.cuda.runtime import CudaError, runtime
from telegrad.transport.device.flags import Flag
from telegrad.transport.device.regions import exported

log = logging.getLogger("telegrad.transport")

FIRST_NUMBER = 2**40
USE_BITS = 20  # of the number of a use that a message carries; the rest follows from the one before
USES = 1 << USE_BITS
FIRST_NAME = FIRST_NUMBER << USE_BITS  # what messages call blocks of device memory begins here
SLAB = 2 * 2**20


class NoRoom(Exception):
    """There is no device memory left for a block, or no more may be taken."""


class Budget:
    """How much memory of each GPU this process may take for blocks, grants and tensors that nobody has taken yet."""

    def __init__(self) -> None:
        self.share = 0.1
        self._taken: dict[int, int] = {}
        self._totals: dict[int, int] = {}
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, int]] = deque()  # what was released by `drop`: append only, no lock

    def allocate(self, device: int, nbytes: int) -> int:
        """Memory within the budget; NoRoom beyond it, or where the GPU has none left."""
        if not self.reserve(device, nbytes):
            limit = int(self._totals[device] * self.share)
            raise NoRoom(f"blocks have {self.taken(device)} bytes of cuda:{device}, and may have {limit}")
        try:
            with torch.cuda.device(device):
                return runtime().allocate(nbytes)
        except CudaError as error:
            self.release(device, nbytes)
            raise NoRoom(str(error)) from error

    def reserve(self, device: int, nbytes: int) -> bool:
        """Count memory that is allocated elsewhere as taken; False if it would be too much."""
        with self._lock:
            if device not in self._totals:
                with torch.cuda.device(device):
                    self._totals[device] = runtime().total_memory()
            taken = self._count(device)
            if taken + nbytes > int(self._totals[device] * self.share):
                return False
            self._taken[device] = taken + nbytes
            return True

    def release(self, device: int, nbytes: int) -> None:
        """The same memory is nobody's business here any more."""
        with self._lock:
            self._taken[device] -= nbytes

    def drop(self, device: int, nbytes: int) -> None:
        """Release it from a finalizer, which may run anywhere, within `reserve` too."""
        self._dropped.append((device, nbytes))

    def _count(self, device: int) -> int:
        while self._dropped:
            dropped, nbytes = self._dropped.popleft()
            self._taken[dropped] -= nbytes
        return self._taken.get(device, 0)

    def free(self, device: int, address: int, nbytes: int) -> None:
        """Give memory back."""
        self.release(device, nbytes)
        try:
            with torch.cuda.device(device):
                runtime().free(address)
        except CudaError as error:
            log.debug("a block of device memory could not be freed: %s", error)

    def taken(self, device: int) -> int:
        """Bytes of this GPU that are taken."""
        with self._lock:
            return self._count(device)


budget = Budget()


class Slab:
    """One allocation, exported once, cut into blocks of one size."""

    __slots__ = ("address", "blocks", "device", "handle", "size")

    def __init__(self, device: int, size: int) -> None:
        self.device = device
        self.size = size
        self.address = budget.allocate(device, size)
        self.handle = runtime().export_memory(self.address)
        self.blocks: list[DeviceBlock] = []
        exported[self.handle] = self.address

    def free(self) -> None:
        """Give the memory back; nobody may have it open."""
        exported.pop(self.handle, None)
        budget.free(self.device, self.address, self.size)  # waits for the GPU
        for block in self.blocks:
            give_back_counter(self.device, block.counter)


class DeviceBlock:
    """A part of a slab that one message at a time travels in."""

    __slots__ = (
        "address",
        "announced",
        "counter",
        "flag",
        "kept",
        "number",
        "offset",
        "size",
        "slab",
        "used_at",
        "uses",
    )

    def __init__(self, slab: Slab, number: int, flag: Flag, offset: int, size: int) -> None:
        self.slab = slab
        self.number = number
        self.flag = flag
        self.offset = offset
        self.size = size
        self.address = slab.address + offset
        self.counter = take_counter(slab.device)
        self.uses = 0
        self.used_at = 0.0  # when it was lent last, on the monotonic clock
        self.announced = False
        self.kept: tuple[object, ...] = ()  # tensors that the peer reads where they lie, until it has

    @property
    def name(self) -> int:
        """What a message calls this use of the block."""
        return self.number << USE_BITS | self.uses % USES


class Announcement(NamedTuple):
    """What a peer needs to know of a block before its first use."""

    number: int
    size: int
    gpu: str
    offset: int
    memory: bytes
    flag: Flag
