"""The receiver's side of device memory: blocks of a peer, opened once, and tensors copied out of them.

Each message that came in a block is a `Loan`; it ends when its tensors have been copied out, or nobody wants them."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from telegrad.cuda import order, reads
from telegrad.cuda.copy_kernel import copy_and_tell, copy_one_and_tell, give_back_counter, take_counter
from telegrad.cuda.forms import Form
from telegrad.cuda.gpus import visible_gpus
from telegrad.cuda.runtime import HANDLE_BYTES, CudaError, runtime
from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport.blocks.mapping import MAX_BLOCK
from telegrad.transport.device.blocks import FIRST_NUMBER, USE_BITS, USES, Announcement
from telegrad.transport.device.flags import Patience, Promise, keep_promises
from telegrad.transport.device.in_place import fence
from telegrad.transport.device.leftovers import close_later
from telegrad.transport.device.regions import MOST_NUMBERS, PLACE_BITS, PLACES, Opened, open_memory

log = logging.getLogger("telegrad.transport")

_MOST_REGIONS = 4096

# The blocks of all loans there are: were they collected together with a loan, its end would find their flags unmapped.
_used: dict[int, BorrowedBlock | str] = {}


class BorrowedBlock:
    """A block of a peer, as this process sees it."""

    __slots__ = ("address", "counter", "device", "flag", "number", "opened", "size", "uses")

    def __init__(self, announced: Announcement, device: int, opened: Opened) -> None:
        self.number = announced.number
        self.address = opened.address + announced.offset
        self.size = announced.size
        self.device = device
        self.flag = announced.flag
        self.opened = opened
        self.counter = take_counter(device)
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

    def __init__(self, expect: Callable[[int, Sequence[Form]], None]) -> None:
        """`expect` is told of which forms tensors came, on which device."""
        self.expect = expect
        self.patience = Patience()
        self._blocks: dict[int, BorrowedBlock | str] = {}  # a text: why it could not be opened
        self._regions: dict[int, Opened | str] = {}  # memory of its allocator, by the number it has there
        self.in_use: set[int] = set()  # what the peer may not name again yet
        self.closed: deque[int] = deque()  # of those that the peer had retired, to be told to it

    def open(self, announced: Announcement) -> str:
        """Open a block that the peer announced; why not, if it cannot be."""
        number = announced.number
        if not FIRST_NUMBER <= number < 2 * FIRST_NUMBER or number in self._blocks:
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
        opened = open_memory(announced.memory, device)
        if announced.offset + announced.size > opened.size:
            opened.drop()
            raise ProtocolError(f"the peer announced a block that ends beyond its {opened.size} bytes")
        return BorrowedBlock(announced, device, opened)

    def open_region(self, number: int, gpu: str, memory: bytes) -> str:
        """Open memory of the peer's allocator; why not, if it cannot be."""
        if not 0 < number < MOST_NUMBERS or number in self._regions or len(self._regions) >= _MOST_REGIONS:
            raise ProtocolError(f"the peer announced region {number} of device memory, which is no new one")
        if len(memory) != HANDLE_BYTES:
            raise ProtocolError("the peer announced a region of device memory without its handle")
        gpus = visible_gpus()
        if gpu not in gpus:
            why = f"this worker does not see the GPU {gpu}"
        else:
            try:
                self._regions[number] = open_memory(memory, gpus.index(gpu))
                return ""
            except CudaError as error:
                why = str(error)
        self._regions[number] = why
        return why

    def region(self, number: int) -> Opened:
        """Opened memory of the peer's allocator."""
        found = self._regions.get(number)
        if found is None:
            raise ProtocolError(f"the peer named region {number} of device memory without announcing it")
        if isinstance(found, str):
            raise SerializationError(f"a tensor lies in device memory that cannot be opened: {found}")
        return found

    def retire_regions(self, numbers: Iterable[int]) -> None:
        """The peer will not name these again: close them."""
        for number in numbers:
            found = self._regions.pop(number, None)
            if isinstance(found, Opened):
                found.drop()

    def borrow(self, name: int) -> Loan:
        """The memory of a block that came with a message, by what the message calls it."""
        number, use = name >> USE_BITS, name % USES
        block = self._blocks.get(number)
        if block is None or number in self.in_use:
            raise ProtocolError(f"the peer used block {number} of device memory without announcing or regaining it")
        if isinstance(block, BorrowedBlock):
            ahead = (use - block.uses) % USES
            if not ahead:
                raise ProtocolError(f"the peer named a use of block {number} of device memory twice")
            block.uses += ahead
        self.in_use.add(number)
        return Loan(self, number, block)

    @property
    def mapped(self) -> int:
        """How many blocks of the peer are open here."""
        return len(self._blocks)

    def let_go(self, number: int, block: BorrowedBlock | str) -> None:
        """A loan has ended; in any thread at any moment, so without a lock."""
        self.in_use.discard(number)
        if isinstance(block, BorrowedBlock):
            block.flag.let_go.set(block.uses)

    def retire(self, numbers: Iterable[int]) -> None:
        """The peer will not use these again: close them, and say so."""
        for number in numbers:
            block = self._blocks.pop(number, None)
            if block is None or number in self.in_use:
                raise ProtocolError(f"the peer retired block {number} of device memory, which it may not")
            if isinstance(block, BorrowedBlock):
                self._close(block)
            self.closed.append(number)

    def _close(self, block: BorrowedBlock) -> None:
        block.opened.drop()
        give_back_counter(block.device, block.counter)

    def close(self, peer_is_gone: Callable[[], bool]) -> None:
        """The connection has ended: close what was opened once nothing reads it any more."""
        blocks = [block for block in self._blocks.values() if isinstance(block, BorrowedBlock)]
        self._blocks.clear()
        if blocks:
            keep_promises([block.promise() for block in blocks], peer_is_gone)
            close_later(functools.partial(self._close_if_read, blocks))
        else:
            self.retire_regions(list(self._regions))

    def _close_if_read(self, blocks: list[BorrowedBlock]) -> bool:
        """Close these unless something is still to be read from one."""
        if any(block.number in self.in_use or not block.flag.read.has_reached(block.uses) for block in blocks):
            return False
        for block in blocks:
            self._close(block)
        self.retire_regions(list(self._regions))
        return True


class Loan:
    """A block that came with a message, until its tensors have been copied out of it or are not wanted any more."""

    __slots__ = ("_block", "_borrower", "_in_place", "_last", "_number", "_over", "_reads", "_told")

    def __init__(self, borrower: DeviceBorrower, number: int, block: BorrowedBlock | str) -> None:
        self._borrower = borrower
        self._number = number
        self._block = block
        self._last = 0  # the stream that read last
        self._reads = False
        self._told = False  # the owner of the block has been told that it was read
        self._in_place = False  # it lies in the sender's own tensors, not in the block
        self._over = False  # the sender may use the block again, and may have
        _used[id(self)] = block

    def part(self, start: int, nbytes: int) -> DeviceSegment:
        """A part of the block, or of the region whose number is above the offset."""
        block = self._block
        if isinstance(block, str):
            return DeviceSegment(self, start, nbytes)
        size = block.size
        if start >= PLACES:
            region = self._borrower.region(start >> PLACE_BITS)
            if region.device != block.device:
                raise ProtocolError("the peer names memory of two GPUs in one block")
            start, size = start % PLACES, region.size
            if start + nbytes <= size:
                self._in_place = True
                return DeviceSegment(self, region.address + start - block.address, nbytes)
        if start + nbytes > size:
            raise ProtocolError(f"a segment of {nbytes} bytes at {start} exceeds its {size} bytes of device memory")
        return DeviceSegment(self, start, nbytes)

    def expect(self, forms: Sequence[Form], device: torch.device) -> None:
        """Have memory ready for the next tensors of these forms, unless they are read where they lie."""
        if not self._in_place:
            self._borrower.expect(device.index, forms)

    def copy_all(self, segments: Sequence[DeviceSegment], targets: Sequence[int], device: torch.device) -> None:
        """Enqueue copies of all that is wanted of it, after the sender's work; nothing else will be read."""
        block = self._opened()
        if device.index != block.device or self._reads:
            for segment, target in zip(segments, targets, strict=True):
                self.copy(segment.offset, segment.nbytes, target, device)
            return
        stream = order.current_stream(block.device)
        number, use, counter = block.flag.read.on_device, block.uses, block.counter
        if self._in_place:
            self._begin_in_place(block)
            self._borrower.in_use.discard(self._number)  # once it was read, which may be long before this is dropped
        elif not self._borrower.patience.sees(block.flag.written, block.uses):
            runtime().wait_value(stream, block.flag.written.on_device, block.uses)
        if len(segments) == 1:
            source = block.address + segments[0].offset
            copy_one_and_tell(block.device, stream, source, targets[0], segments[0].nbytes, number, use, counter)
        else:
            pieces = [(block.address + s.offset, at, s.nbytes) for s, at in zip(segments, targets, strict=True)]
            copy_and_tell(block.device, stream, pieces, number, use, counter)
        self._told = True
        self._over = self._in_place
        if self._in_place:
            reads.reading(block.flag.read, use)

    def _begin_in_place(self, block: BorrowedBlock) -> None:
        """Say that this is being read from now on; SerializationError if it may not be any more."""
        block.flag.let_go.set(block.uses)
        with fence:
            pass
        if block.flag.given_up.has_reached(block.uses):
            raise SerializationError("the tensors of a call cannot be read any more: its caller has given it up")

    def _opened(self) -> BorrowedBlock:
        block = self._block
        if isinstance(block, str):
            raise SerializationError(f"a tensor came in device memory that cannot be opened: {block}")
        return block

    def copy(self, offset: int, nbytes: int, target: int, device: torch.device) -> None:
        """Enqueue a copy to memory on `device`, on its current stream, after the sender's work."""
        block = self._opened()
        stream = order.current_stream(block.device)
        if stream != self._last or not self._reads:
            if self._reads:  # of a message to two devices: one after the other
                torch.cuda.ExternalStream(stream, block.device).wait_stream(  # type: ignore[no-untyped-call] # torch's
                    torch.cuda.ExternalStream(self._last, block.device)  # type: ignore[no-untyped-call] # of torch's
                )
            if self._in_place:
                self._begin_in_place(block)
            elif not block.flag.written.will_soon_reach(block.uses):
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
        if self._in_place:  # no common message: read before anything else comes of it (see `reads.reading`)
            runtime().synchronize(stream)

    def __del__(self) -> None:
        if self._over:
            _used.pop(id(self), None)
            return
        block = self._block
        if isinstance(block, BorrowedBlock) and self._in_place and not self._reads:
            if not self._told:
                block.flag.read.set(block.uses)  # nobody reads it
        elif isinstance(block, BorrowedBlock) and not self._told:
            try:  # if nobody has read it, on the default stream: it was read as far as its owner is concerned
                runtime().write_value(self._last, block.flag.read.on_device, block.uses)
            except CudaError as error:
                log.debug("the end of a loan could not be told: %s", error)
                block.flag.read.set(block.uses)
        self._borrower.let_go(self._number, block)
        _used.pop(id(self), None)


class DeviceSegment:
    """One run of tensor bytes in a borrowed block."""

    __slots__ = ("loan", "nbytes", "offset")
    granted = False  # not written to memory of this process

    def __init__(self, loan: Loan, offset: int, nbytes: int) -> None:
        self.loan = loan
        self.offset = offset
        self.nbytes = nbytes

    def copy_to(self, target: int, device: torch.device) -> None:
        """Enqueue a copy of all of it to `target`, memory on `device`."""
        self.loan.copy(self.offset, self.nbytes, target, device)

    def storage_on(self, device: torch.device) -> torch.UntypedStorage:
        """A copy of it in a storage of its own."""
        storage = torch.empty(self.nbytes, dtype=torch.uint8, device=device).untyped_storage()
        if self.nbytes:
            self.copy_to(storage.data_ptr(), device)
            if device.type == "cuda":
                self.expect([Form(torch.uint8, (self.nbytes,), ())], device)
        return storage

    def expect(self, forms: Sequence[Form], device: torch.device) -> None:
        """Tensors of these forms came in its message: memory is kept ready for the next ones."""
        self.loan.expect(forms, device)
