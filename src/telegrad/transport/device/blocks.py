"""Blocks of device memory that tensors travel in between two workers on one host; `transport/blocks` is the model.

The sender copies tensors into a block it owns and has exported once, on its current stream, and sends the message
without waiting for the GPU. The receiver's stream waits until the block is written, copies the tensors out into memory
of its own, and the block goes back. Whoever writes to it next has its stream wait until it was read. So nobody waits
for the GPU but the GPU. Each use of a block has a number; that it was written, and read, is a number in host memory
that both processes share and both their GPUs see (`flags.py`).

A received tensor is the receiver's own memory: it outlives the sender, and torch's allocator knows it. Why not an alias
of the block, as in host memory, and why not CUDA's events, is in docs/decisions.

Small blocks share an allocation (a `Slab`), since CUDA gives out memory in pieces of 2 MB. Memory that a peer has open
must not be freed: a slab is retired, the peer closes it and says so, and then it is freed. After a lost connection the
peer cannot say so; what is left then is freed after a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from telegrad.cuda import order
from telegrad.cuda.gpus import visible_gpus
from telegrad.cuda.runtime import HANDLE_BYTES, CudaError, runtime
from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport.blocks.mapping import MAX_BLOCK, block_size
from telegrad.transport.device.flags import Flag, Flags, Promise, keep_promises

log = logging.getLogger("telegrad.transport")

_FIRST_NUMBER = 2**40
_USE_BITS = 20  # of the number of a use that a message carries; the rest follows from the one before
_USES = 1 << _USE_BITS
FIRST_NAME = _FIRST_NUMBER << _USE_BITS  # what messages call blocks of device memory begins here
SLAB = 2 * 2**20
_GRACE_SECONDS = 5.0  # after a lost connection, for a peer that may still be copying


class NoRoom(Exception):
    """There is no device memory to be had for a block, or no more may be taken."""


class Budget:
    """How much memory of each GPU the blocks of this process may take."""

    def __init__(self) -> None:
        self.share = 0.1
        self._taken: dict[int, int] = {}
        self._totals: dict[int, int] = {}
        self._lock = threading.Lock()

    def allocate(self, device: int, nbytes: int) -> int:
        """Memory within the budget; NoRoom beyond it, or where the GPU has none left."""
        with torch.cuda.device(device):
            with self._lock:
                if device not in self._totals:
                    self._totals[device] = runtime().total_memory()
                taken, limit = self._taken.get(device, 0), int(self._totals[device] * self.share)
                if taken + nbytes > limit:
                    raise NoRoom(f"blocks have {taken} bytes of cuda:{device}, and may have {limit}")
                self._taken[device] = taken + nbytes
            try:
                return runtime().allocate(nbytes)
            except CudaError as error:
                with self._lock:
                    self._taken[device] -= nbytes
                raise NoRoom(str(error)) from error

    def free(self, device: int, address: int, nbytes: int) -> None:
        """Give memory back."""
        with self._lock:
            self._taken[device] -= nbytes
        try:
            with torch.cuda.device(device):
                runtime().free(address)
        except CudaError as error:
            log.debug("a block of device memory could not be freed: %s", error)

    def taken(self, device: int) -> int:
        """Bytes of this GPU in blocks of this process."""
        return self._taken.get(device, 0)


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

    def free(self) -> None:
        """Give the memory back; nobody may have it open."""
        _exported.pop(self.handle, None)
        budget.free(self.device, self.address, self.size)


class DeviceBlock:
    """A part of a slab that one message at a time travels in."""

    __slots__ = ("address", "announced", "flag", "idle_since", "number", "offset", "size", "slab", "uses")

    def __init__(self, slab: Slab, number: int, flag: Flag, offset: int, size: int) -> None:
        self.slab = slab
        self.number = number
        self.flag = flag
        self.offset = offset
        self.size = size
        self.address = slab.address + offset
        self.uses = 0
        self.idle_since = 0.0
        self.announced = False

    @property
    def name(self) -> int:
        """What a message calls this use of the block."""
        return self.number << _USE_BITS | self.uses % _USES


# What this process has exported itself, by handle: it cannot be opened where it comes from (a worker may call itself).
_exported: dict[bytes, int] = {}


class Announcement(NamedTuple):
    """What a peer needs to know of a block before its first use."""

    number: int
    size: int
    gpu: str
    offset: int
    memory: bytes
    flag: Flag


class DeviceLender:
    """The sender's blocks for one peer: free, or lent with a message until the peer has copied it out."""

    def __init__(self, flags: Callable[[], Flags]) -> None:
        """`flags` makes those of this connection, when the first block is taken."""
        self._make_flags = flags
        self._flags: Flags | None = None
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, int], list[DeviceBlock]] = {}  # by device and size
        self._lent: dict[int, DeviceBlock] = {}
        self._slabs: set[Slab] = set()
        self._retired: list[int] = []  # to be told to the peer
        self._closing: dict[int, DeviceBlock] = {}  # told, and not yet closed by the peer
        self._next = _FIRST_NUMBER
        self._closed = False

    def take(self, device: int, nbytes: int) -> DeviceBlock:
        """A block of at least `nbytes`, lent from now on. Raises NoRoom."""
        size = block_size(nbytes)
        with self._lock:
            if self._closed:
                raise NoRoom("the connection is closed")
            idle = self._idle.get((device, size))
            if not idle:
                idle = self._create(device, size)
            block = idle.pop()
            block.uses += 1
            self._lent[block.number] = block
        return block

    def _create(self, device: int, size: int) -> list[DeviceBlock]:
        """Under the lock: a new slab; its blocks, all idle."""
        if self._flags is None:
            self._flags = self._make_flags()
        count = max(1, SLAB // size)
        if not self._flags.has_room(count):
            raise NoRoom("the connection has as many blocks of device memory as it can have")
        slab = Slab(device, -(-size // SLAB) * SLAB)
        self._slabs.add(slab)
        _exported[slab.handle] = slab.address
        for offset in range(0, slab.size - size + 1, size):
            block = DeviceBlock(slab, self._next, self._flags.take(), offset, size)
            block.idle_since = time.monotonic()
            self._next += 1
            slab.blocks.append(block)
        idle = self._idle.setdefault((device, size), [])
        idle.extend(reversed(slab.blocks))
        return idle

    def give_back(self, numbers: Iterable[int]) -> None:
        """The peer has copied these out, or closed them if they were retired."""
        freed = []
        with self._lock:
            if self._closed:
                raise ConnectionResetError("the connection was closed while something was being read from it")
            for number in numbers:
                block = self._lent.pop(number, None)
                if block is not None:
                    block.idle_since = time.monotonic()
                    self._idle.setdefault((block.slab.device, block.size), []).append(block)
                    continue
                block = self._closing.pop(number, None)
                if block is None:
                    raise ProtocolError(
                        f"the peer released block {number} of device memory, which it had not been lent"
                    )
                if not any(b.number in self._closing for b in block.slab.blocks):
                    self._slabs.discard(block.slab)
                    freed.append(block.slab)
        for slab in freed:  # outside the lock: it waits for the GPU
            slab.free()

    def trim(self, before: float) -> None:
        """Retire the slabs that have been idle since `before` on the monotonic clock."""
        freed = []
        with self._lock:
            for slab in list(self._slabs):
                idle = self._idle.get((slab.device, slab.blocks[0].size), [])
                mine = [block for block in idle if block.slab is slab and block.idle_since < before]
                if len(mine) < len(slab.blocks):
                    continue
                idle[:] = [block for block in idle if block.slab is not slab]
                known = [block for block in mine if block.announced]
                if not known:
                    self._slabs.discard(slab)
                    freed.append(slab)
                for block in known:
                    self._closing[block.number] = block
                    self._retired.append(block.number)
        for slab in freed:
            slab.free()

    @property
    def has_blocks(self) -> bool:
        """Whether there is a block at all."""
        return bool(self._slabs)

    @property
    def has_retired(self) -> bool:
        """Whether the peer should be told something."""
        return bool(self._retired)

    def retired(self) -> tuple[int, ...]:
        """Blocks the peer should be told to close; each is named once."""
        with self._lock:
            numbers, self._retired = tuple(self._retired), []
        return numbers

    def lent(self) -> tuple[int, int]:
        """How many blocks the peer has not given back, and their bytes."""
        with self._lock:
            return len(self._lent), sum(block.size for block in self._lent.values())

    def close(self, peer_is_gone: Callable[[], bool]) -> None:
        """The connection has ended. The peer may still be copying, so the memory goes after a while."""
        with self._lock:
            slabs, self._slabs = self._slabs, set()
            blocks = [block for slab in slabs for block in slab.blocks]
            keep_promises([Promise(block.flag.read, block.uses) for block in blocks], peer_is_gone)
            self._lent.clear()
            self._idle.clear()
            self._closing.clear()
            self._closed = True
        if slabs:
            _left.append((time.monotonic() + _GRACE_SECONDS, slabs))
            _collect_later()


class _Opened:
    """Memory of a peer that is mapped here, for as long as blocks lie in it."""

    __slots__ = ("address", "device", "own", "users")

    def __init__(self, address: int, device: int, own: bool) -> None:
        self.address = address
        self.device = device
        self.own = own  # exported by this very process: nothing to close
        self.users = 0

    def drop(self) -> None:
        self.users -= 1
        if not self.users and not self.own:
            try:
                with torch.cuda.device(self.device):
                    runtime().close_memory(self.address)
            except CudaError as error:
                log.debug("memory of a peer could not be closed: %s", error)


class BorrowedBlock:
    """A block of a peer, as this process sees it."""

    __slots__ = ("address", "device", "flag", "number", "opened", "size", "uses")

    def __init__(self, announced: Announcement, device: int, opened: _Opened) -> None:
        self.number = announced.number
        self.address = opened.address + announced.offset
        self.size = announced.size
        self.device = device
        self.flag = announced.flag
        self.opened = opened
        self.uses = 0

    def promise(self) -> Promise:
        """What streams here may be waiting for."""
        return Promise(self.flag.written, self.uses, self._spoil)

    def _spoil(self) -> None:
        """The peer will never write what it had promised: let nobody take what lies there for it."""
        with torch.cuda.device(self.device):
            runtime().fill(self.address, 0xFF, self.size)


class DeviceBorrower:
    """The receiver's view of one peer's blocks: opens each once, and notes when it has been copied out."""

    def __init__(self) -> None:
        self._blocks: dict[int, BorrowedBlock | str] = {}  # a text: why it could not be opened
        self._opened: dict[bytes, _Opened] = {}
        self._in_use: set[int] = set()
        # Filled when a loan is let go of, in any thread at any moment: append only, no lock.
        self.released: deque[int] = deque()

    def open(self, announced: Announcement) -> str:
        """Open a block that the peer announced; why not, if it cannot be."""
        number = announced.number
        if not _FIRST_NUMBER <= number < 2 * _FIRST_NUMBER or number in self._blocks:
            raise ProtocolError(f"the peer announced block {number} of device memory, which is no new one")
        if not 0 < announced.size <= MAX_BLOCK or announced.offset < 0:
            raise ProtocolError(f"the peer announced {announced.size} bytes of device memory at {announced.offset}")
        if len(announced.memory) != HANDLE_BYTES:
            raise ProtocolError("the peer announced a block of device memory without its handle")
        gpus = visible_gpus()
        if announced.gpu not in gpus:
            why = f"this worker does not see the GPU {announced.gpu}"
        else:
            try:
                self._blocks[number] = self._map(gpus.index(announced.gpu), announced)
                return ""
            except CudaError as error:
                why = str(error)
        self._blocks[number] = why
        return why

    def _map(self, device: int, announced: Announcement) -> BorrowedBlock:
        opened = self._opened.get(announced.memory)
        with torch.cuda.device(device):
            if opened is None:
                own = _exported.get(announced.memory)
                address = own if own is not None else runtime().open_memory(announced.memory)
                opened = self._opened[announced.memory] = _Opened(address, device, own is not None)
        opened.users += 1
        return BorrowedBlock(announced, device, opened)

    def borrow(self, name: int) -> Loan:
        """The memory of a block that came with a message, by what the message calls it."""
        number, use = name >> _USE_BITS, name % _USES
        block = self._blocks.get(number)
        if block is None or number in self._in_use:
            raise ProtocolError(f"the peer used block {number} of device memory without announcing or regaining it")
        if isinstance(block, BorrowedBlock):
            ahead = (use - block.uses) % _USES
            if not ahead:
                raise ProtocolError(f"the peer named a use of block {number} of device memory twice")
            block.uses += ahead
        self._in_use.add(number)
        return Loan(self, number, block)

    @property
    def mapped(self) -> int:
        """How many blocks of the peer are open here."""
        return len(self._blocks)

    def let_go(self, number: int) -> None:
        """A loan has ended."""
        self._in_use.discard(number)
        self.released.append(number)

    def retire(self, numbers: Iterable[int]) -> None:
        """The peer will not use these again: close them, and say so."""
        for number in numbers:
            block = self._blocks.pop(number, None)
            if block is None or number in self._in_use:
                raise ProtocolError(f"the peer retired block {number} of device memory, which it may not")
            if isinstance(block, BorrowedBlock):
                self._close(block)
            self.released.append(number)

    def _close(self, block: BorrowedBlock) -> None:
        block.opened.drop()
        if not block.opened.users:
            self._opened = {handle: opened for handle, opened in self._opened.items() if opened.users}

    def close(self, peer_is_gone: Callable[[], bool]) -> None:
        """The connection has ended: close what was opened once nothing reads it any more."""
        blocks = [block for block in self._blocks.values() if isinstance(block, BorrowedBlock)]
        self._blocks.clear()
        if blocks:
            keep_promises([block.promise() for block in blocks], peer_is_gone)
            _unclosed.append((self, blocks))
            collect()
            _collect_later()

    def close_if_read(self, blocks: list[BorrowedBlock]) -> bool:
        """Close these unless something is still to be read from one."""
        if any(block.number in self._in_use or not block.flag.read.has_reached(block.uses) for block in blocks):
            return False
        for block in blocks:
            self._close(block)
        return True


# What connections that have ended left behind: memory to free once peers have had time to copy, memory of peers to
# close once it has been copied.
_left: deque[tuple[float, set[Slab]]] = deque()
_unclosed: deque[tuple[DeviceBorrower, list[BorrowedBlock]]] = deque()


def collect() -> None:
    """Free and close what may be by now; called now and then."""
    for _ in range(len(_unclosed)):
        try:
            borrower, blocks = _unclosed.popleft()
        except IndexError:  # another thread does the same
            break
        if not borrower.close_if_read(blocks):
            _unclosed.append((borrower, blocks))
    while _left and _left[0][0] <= time.monotonic():
        try:
            _, slabs = _left.popleft()
        except IndexError:
            break
        for slab in slabs:
            slab.free()


def _collect_later() -> None:
    """The agent, which tidies now and then, may be gone by then."""
    timer = threading.Timer(_GRACE_SECONDS + 1.0, collect)
    timer.daemon = True
    timer.start()


class Loan:
    """A block that came with a message, until its tensors have been copied out of it or are not wanted any more."""

    __slots__ = ("_block", "_borrower", "_last", "_number", "_reads")

    def __init__(self, borrower: DeviceBorrower, number: int, block: BorrowedBlock | str) -> None:
        self._borrower = borrower
        self._number = number
        self._block = block
        self._last = 0  # the stream that read last
        self._reads = False

    def __len__(self) -> int:
        return self._block.size if isinstance(self._block, BorrowedBlock) else MAX_BLOCK

    def __getitem__(self, part: slice) -> DeviceSegment:
        return DeviceSegment(self, part.start, part.stop - part.start)

    def copy(self, offset: int, nbytes: int, target: int, device: torch.device) -> None:
        """Enqueue a copy to memory on `device`, on its current stream, after the sender's work."""
        block = self._block
        if isinstance(block, str):
            raise SerializationError(f"a tensor came in device memory that cannot be opened: {block}")
        stream = order.current_stream(block.device)
        if stream != self._last or not self._reads:
            if self._reads:  # of a message to two devices: one after the other
                torch.cuda.ExternalStream(stream, block.device).wait_stream(  # type: ignore[no-untyped-call] # torch's
                    torch.cuda.ExternalStream(self._last, block.device)  # type: ignore[no-untyped-call] # of torch's
                )
            if not block.flag.written.will_soon_reach(block.uses):
                runtime().wait_value(stream, block.flag.written.on_device, block.uses)
            self._last, self._reads = stream, True
        if device.type == "cuda" and device.index == block.device:
            runtime().copy(target, block.address + offset, nbytes, stream)
        elif device.type == "cuda":  # another GPU, whose stream has to see it: by the stream of the GPU where it lies
            ours, theirs = torch.cuda.current_stream(block.device), torch.cuda.current_stream(device)
            ours.wait_stream(theirs)
            runtime().copy(target, block.address + offset, nbytes, stream)
            theirs.wait_stream(ours)
        else:
            runtime().copy(target, block.address + offset, nbytes, stream)
            runtime().synchronize(stream)

    def __del__(self) -> None:
        block = self._block
        if isinstance(block, BorrowedBlock):
            try:  # if nobody has read it, on the default stream: it was read as far as its owner is concerned
                runtime().write_value(self._last, block.flag.read.on_device, block.uses)
            except CudaError as error:
                log.debug("the end of a loan could not be told: %s", error)
                block.flag.read.set(block.uses)
        self._borrower.let_go(self._number)


class DeviceSegment:
    """One run of tensor bytes in a borrowed block."""

    __slots__ = ("_loan", "_offset", "nbytes")

    def __init__(self, loan: Loan, offset: int, nbytes: int) -> None:
        self._loan = loan
        self._offset = offset
        self.nbytes = nbytes

    def copy_to(self, target: int, device: torch.device) -> None:
        """Enqueue a copy of all of it to `target`, memory on `device`."""
        self._loan.copy(self._offset, self.nbytes, target, device)

    def storage_on(self, device: torch.device) -> torch.UntypedStorage:
        """A copy of it in a storage of its own."""
        storage = torch.empty(self.nbytes, dtype=torch.uint8, device=device).untyped_storage()
        if self.nbytes:
            self.copy_to(storage.data_ptr(), device)
        return storage


def gpu_id(device: int) -> str:
    """What names a GPU on this host, whatever number it has in which process."""
    return visible_gpus()[device]
