"""Memory of torch's allocator that a peer reads or writes where it lies: whole allocations, exported and opened once.

torch cuts tensors out of larger allocations, and CUDA exports those. A `Region` is one of them. A peer that is told of
it opens it, and messages name places in it from then on. torch may free an allocation that a peer has open, when its
user empties its cache: what the peer has mapped stays, unused, until it is told to close it, and only then has the GPU
that memory again (seen so; CUDA promises nothing). A new allocation at the same address is told by its identity.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Container

import torch

from telegrad.cuda.gpus import gpu_id
from telegrad.cuda.runtime import CudaError, runtime
from telegrad.transport.device.flags import Number
from telegrad.wire.block_notices import AnnounceDeviceRegion, RetireDeviceRegions
from telegrad.wire.messages import AnyMessage

log = logging.getLogger("telegrad.transport")

PLACE_BITS = 40  # of a place in a region; the number of the region is above
PLACES = 1 << PLACE_BITS
MOST_NUMBERS = 1 << 22
_MOST_KNOWN = 1024  # at a time

# What this process has exported itself, by handle: it cannot be opened where it comes from (a worker may call itself).
exported: dict[bytes, int] = {}


class Region:
    """An allocation of this process, as peers get to know it."""

    __slots__ = ("handle", "identity", "number", "size", "start")

    def __init__(self, number: int, start: int, size: int, identity: int, handle: bytes) -> None:
        self.number = number
        self.start = start
        self.size = size
        self.identity = identity
        self.handle = handle  # none: it cannot be exported


class _Regions:
    """Those of this process that are known."""

    def __init__(self) -> None:
        self._by_start: dict[int, Region] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def of(self, address: int) -> Region | None:
        """The region of some memory; None if peers cannot reach it."""
        identity, start, size = runtime().allocation_of(address)
        region = self._by_start.get(start)
        if region is None or region.identity != identity:
            region = self._add(start, size, identity)
        return region if region.handle else None

    def _add(self, start: int, size: int, identity: int) -> Region:
        with self._lock:
            if len(self._by_start) >= _MOST_KNOWN:  # most have been freed by now; the rest get new numbers
                for old in self._by_start.values():
                    exported.pop(old.handle, None)
                self._by_start.clear()
            try:
                number = next(self._numbers)
                if number >= MOST_NUMBERS:
                    raise CudaError("more allocations than have numbers")
                handle = runtime().export_memory(start)
            except CudaError as error:  # torch's "expandable segments", or a pool of the driver's
                log.debug("memory of torch's allocator cannot be exported: %s", error)
                handle = b""
            else:
                exported[handle] = start
            made = Region(number, start, size, identity, handle)
            self._by_start[start] = made
            return made


regions = _Regions()


class Opened:
    """Memory of a peer, mapped here for as long as somebody uses it."""

    __slots__ = ("_handle", "_own", "_users", "address", "device", "size")

    def __init__(self, handle: bytes, device: int) -> None:
        own = exported.get(handle)
        self._handle = handle
        self._own = own is not None  # exported by this very process: nothing to close
        self._users = 0
        self.device = device
        with torch.cuda.device(device):
            self.address = own if own is not None else runtime().open_memory(handle)
            self.size = runtime().allocation_of(self.address).size

    def use(self) -> Opened:
        """One more uses it."""
        with _opening:
            self._users += 1
        return self

    def drop(self) -> None:
        """One who used it does so no longer; nothing on the GPU is to come to it from there."""
        with _opening:
            self._users -= 1
            if self._users:
                return
            _opened.pop(self._handle, None)
            if self._own:
                return
            try:
                with torch.cuda.device(self.device):
                    runtime().close_memory(self.address)
            except CudaError as error:
                log.debug("memory of a peer could not be closed: %s", error)


_opened: dict[bytes, Opened] = {}  # by handle: several connections may open the same
_opening = threading.RLock()


def open_memory(handle: bytes, device: int) -> Opened:
    """Memory of a peer, used by one more; CudaError if it cannot be opened."""
    with _opening:
        found = _opened.get(handle)
        if found is None:
            found = _opened[handle] = Opened(handle, device)
        return found.use()


class _Shown:
    """A region that the peer has open."""

    __slots__ = ("reads", "used_at")

    def __init__(self) -> None:
        self.used_at = 0.0
        self.reads: list[tuple[Number, int]] = []  # what is, or will be, when the peer has read in it


class ShownRegions:
    """Those of this process that the peer of one connection has open."""

    def __init__(self, tell: Callable[[AnyMessage], None]) -> None:
        self._tell = tell
        self._shown: dict[int, _Shown] = {}  # by number
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shown)

    def show(self, region: Region, device: int, read: Number | None = None, use: int = 0) -> None:
        """Have the peer know a region; it stays open at least until `read` is `use`."""
        with self._lock:
            shown = self._shown.get(region.number)
            if shown is None:
                self._tell(AnnounceDeviceRegion(region.number, gpu_id(device), region.handle))
                shown = self._shown[region.number] = _Shown()
            shown.used_at = time.monotonic()
            if read is not None:
                if shown.reads and shown.reads[-1][0] is read:  # a later use of the same block
                    shown.reads.pop()
                elif shown.reads:
                    shown.reads = [one for one in shown.reads if not one[0].has_reached(one[1])]
                shown.reads.append((read, use))

    def retire(self, before: float, besides: Container[int]) -> None:
        """Have the peer close those that have not been used since `before`, but for some."""
        with self._lock:
            idle = [
                number
                for number, shown in self._shown.items()
                if shown.used_at < before
                and number not in besides
                and all(read.has_reached(value) for read, value in shown.reads)
            ]
            for number in idle:
                del self._shown[number]
            if idle:
                self._tell(RetireDeviceRegions(tuple(idle)))
