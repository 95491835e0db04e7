"""Shared memory between two workers on one host: a sender lends blocks with its messages, a receiver borrows them.

A sender copies tensors once, into a block of shared memory it owns (`Lender`); the receiver's tensors alias that block
(`Borrower`) until their storage is freed, and then the block goes back to the sender. A receiver that sends the memory
back and keeps nothing of it copies nothing: the sender's own tensors alias the block then (`Lender.regain`), which is
free again when both have let go of it. Who may write to a block is never in doubt: its sender until the message is
sent, its receiver until it is released or sent back.
"""

import bisect
import fcntl
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.transport.blocks.mapping import IDLE_LIMIT, MAX_BLOCK, Block, Mapping, block_size, count_idle_since

MAX_NUMBER = 2**62
MOST_BLOCKS = 8192  # of one peer that are mapped at a time; the system allows a process some 65,000 mappings in all
# A block that its sender makes smaller kills whoever reads it (SIGBUS): it is fixed when made, and one that is not is
# refused.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Lender:
    """The sender's shared blocks for one peer: free, or lent with a message until the peer releases them."""

    def __init__(self, idle_limit: int = IDLE_LIMIT) -> None:
        self._lock = threading.Lock()
        self._idle_limit = idle_limit
        self._idle: dict[int, list[Block]] = {}
        self._idle_bytes = 0
        self._lent: dict[int, Block] = {}
        self._next = 1
        self.untold: list[int] = []  # blocks that were given up, of which the peer does not know yet
        self._regained: dict[int, int] = {}  # lent blocks that tensors here alias again, and how often
        self._released: set[int] = set()  # of those, the ones that the peer has let go of
        self._aliases: dict[int, weakref.ref[Any]] = {}
        # Filled from weakref callbacks, which may run in any thread at any moment: append only, no lock.
        self._let_go: deque[int] = deque()
        self._lent_bytes = 0
        self._closed = False

    @property
    def lent_bytes(self) -> int:
        """Bytes in blocks that somebody uses, the peer or tensors here."""
        with self._lock:
            self._note_let_go()
            return self._lent_bytes

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, lent from now on. Raises OSError where there is no shared memory."""
        size = block_size(nbytes)
        with self._lock:
            self._note_let_go()
            idle = self._idle.get(size)
            if idle:
                block = idle.pop()
                self._idle_bytes -= size
            else:
                block = self._create(size)
            self._lent[block.number] = block
            self._lent_bytes += size
        return block

    def _create(self, size: int) -> Block:
        fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            block = Block(self._next, size, fd)
        except OSError:
            os.close(fd)
            raise
        self._next += 1
        return block

    def give_back(self, numbers: Iterable[int]) -> None:
        """The peer released these."""
        with self._lock:
            self._check_open()
            self._note_let_go()
            for number in numbers:
                if number not in self._lent or number in self._released:
                    raise ProtocolError(f"the peer released block {number}, which it had not been lent")
                if number in self._regained:
                    self._released.add(number)
                else:
                    self._take_in(number)

    def _take_in(self, number: int) -> None:
        """Under the lock: nobody uses this block any more."""
        block = self._lent.pop(number)
        self._lent_bytes -= block.size
        if self._idle_bytes + block.size > self._idle_limit:
            block.close()
            self.untold.append(number)
        else:
            block.idle_since = time.monotonic()
            self._idle.setdefault(block.size, []).append(block)
            self._idle_bytes += block.size

    def regain(self, number: int) -> Any:
        """The memory of a lent block, part of which the peer sent back."""
        with self._lock:
            self._check_open()
            if number not in self._lent or number in self._released:
                raise ProtocolError(f"the peer sent back block {number}, which it had not been lent")
            self._regained[number] = self._regained.get(number, 0) + 1
            block = self._lent[number]
        alias = block.alias()
        key = id(alias)

        def freed(_: object, number: int = number, key: int = key) -> None:
            self._aliases.pop(key, None)
            self._let_go.append(number)

        self._aliases[key] = weakref.ref(alias, freed)
        return alias

    def _check_open(self) -> None:
        """Under the lock. Another thread may still read from a connection that was closed: no fault of the peer's."""
        if self._closed:
            raise ConnectionResetError("the connection was closed while something was being read from it")

    def _note_let_go(self) -> None:
        """Under the lock: take note of the blocks that nothing here aliases any more."""
        while self._let_go:
            number = self._let_go.popleft()
            left = self._regained.get(number, 0) - 1  # none if the lender was closed meanwhile
            if left > 0:
                self._regained[number] = left
            elif left == 0:
                del self._regained[number]
                if number in self._released:
                    self._released.remove(number)
                    self._take_in(number)

    def trim(self, before: float) -> None:
        """Retire the blocks that have been idle since `before` on the monotonic clock."""
        gone: list[Block] = []  # unmapped after the lock is free: that takes a while for large ones
        with self._lock:
            self._note_let_go()
            for size, idle in list(self._idle.items()):
                old = count_idle_since(idle, before)
                gone += idle[:old]
                del idle[:old]
                if not idle:
                    del self._idle[size]
            for block in gone:
                block.close()
                self._idle_bytes -= block.size
                self.untold.append(block.number)

    @property
    def has_blocks(self) -> bool:
        """Whether there is a block at all, idle or lent."""
        return bool(self._lent or self._idle)

    def retired(self) -> tuple[int, ...]:
        """Blocks the peer should be told to unmap; each is named once."""
        if not self.untold:
            return ()
        with self._lock:
            numbers = tuple(self.untold)
            self.untold.clear()
        return numbers

    def close(self) -> None:
        """Give up all blocks; those still aliased live on in whoever mapped them."""
        with self._lock:
            for block in self._lent.values():
                block.close()
            for idle in self._idle.values():
                for block in idle:
                    block.close()
            self._lent.clear()
            self._regained.clear()
            self._released.clear()
            self._idle.clear()
            self._idle_bytes = self._lent_bytes = 0
            self._closed = True


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # not a kind of file that can be sealed
        return False


class Borrower:
    """The receiver's view of one peer's blocks: maps each once, and notes when nothing here uses it any more."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._by_address: list[tuple[int, int]] = []  # where each block begins, and its number
        self._in_use: dict[int, weakref.ref[Any]] = {}
        # Filled from weakref callbacks, which may run in any thread at any moment: append only, no lock.
        self.untold: deque[int] = deque()  # blocks that are free again, of which the peer does not know yet

    def map(self, number: int, fd: int, size: int) -> None:
        """Map a block the peer announced. Takes over `fd`."""
        try:
            if not 0 < size <= MAX_BLOCK or size > os.fstat(fd).st_size:
                raise ProtocolError(f"the peer announced block {number} with {size} bytes, more than it has")
            if not _is_sealed(fd):
                raise ProtocolError(f"the peer announced block {number}, which it could still make smaller")
            if number in self._blocks or len(self._blocks) >= MOST_BLOCKS:
                raise ProtocolError(f"the peer announced block {number} twice, or more than {MOST_BLOCKS} blocks")
            block = Block(number, size, fd)
            block.fd = -1
            self._blocks[number] = block
            self._sort()
        finally:
            os.close(fd)

    def _sort(self) -> None:
        self._by_address = sorted((block.address, number) for number, block in self._blocks.items())

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """The block in use that this memory lies in, and the offset there; None if it lies elsewhere."""
        by_address = self._by_address  # replaced whole by the thread that reads
        place = bisect.bisect_right(by_address, (address, MAX_NUMBER)) - 1
        if place < 0:
            return None
        begin, number = by_address[place]
        block = self._blocks.get(number)  # none if another thread retires it, which no tensor here lies in then
        if block is None or number not in self._in_use or address + nbytes > begin + block.size:
            return None
        return number, address - begin

    def mapping_of(self, number: int) -> Mapping:
        """The memory of a block, for as long as somebody refers to it."""
        return self._blocks[number].mapping

    def size_of(self, number: int) -> int:
        """How many bytes a block has."""
        return self._blocks[number].size

    def __contains__(self, number: int) -> bool:
        return number in self._blocks

    def borrow(self, number: int) -> Any:
        """The memory of a block that came with a message; it is released when the last tensor over it is freed."""
        if number in self._in_use:
            raise ProtocolError(f"the peer used block {number} twice without waiting for its release")
        alias = self._blocks[number].alias()

        def freed(_: object, number: int = number) -> None:
            self._in_use.pop(number, None)
            self.untold.append(number)

        self._in_use[number] = weakref.ref(alias, freed)
        return alias

    def released(self) -> tuple[int, ...]:
        """Blocks freed since the last time; each is named once."""
        if not self.untold:
            return ()
        numbers = []
        while self.untold:
            try:
                numbers.append(self.untold.popleft())
            except IndexError:  # another thread took the last one
                break
        return tuple(numbers)

    def retire(self, numbers: Iterable[int]) -> None:
        """The peer will not use these again."""
        for number in numbers:
            self._blocks.pop(number, None)
        self._sort()

    @property
    def mapped(self) -> int:
        """How many blocks are mapped."""
        return len(self._blocks)

    @property
    def in_use(self) -> int:
        """How many blocks some tensor here still aliases."""
        return len(self._in_use)
