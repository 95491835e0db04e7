"""The sender's side of device memory: blocks that are idle, or lent with a message until the peer has copied it out.

That a block is out of use again is said by a number in shared memory, not by a message: the peer sets it when it has
enqueued its copy, and the lender looks when it needs a block (`flags.py`)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from telegrad.errors import ProtocolError
from telegrad.transport.blocks.mapping import block_size
from telegrad.transport.device.blocks import FIRST_NUMBER, SLAB, DeviceBlock, NoRoom, Slab
from telegrad.transport.device.flags import Flags, Promise, keep_promises
from telegrad.transport.device.leftovers import close_later, free_later

_LOOK_AT = 8  # blocks, when one is needed: the oldest come back first


class DeviceLender:
    """The blocks for one peer. Any thread may take one."""

    def __init__(self, flags: Callable[[], Flags]) -> None:
        """`flags` makes those of this connection, when the first block is taken."""
        self._make_flags = flags
        self._flags: Flags | None = None
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, int], list[DeviceBlock]] = {}  # by device and size
        self._lent: dict[tuple[int, int], deque[DeviceBlock]] = {}  # the same, the oldest first
        self._reading: dict[int, DeviceBlock] = {}  # by device: what `take_read` gave last, neither idle nor lent
        self._slabs: set[Slab] = set()
        self.untold: list[int] = []  # those that were retired: the peer is to close them
        self._closing: dict[int, DeviceBlock] = {}  # told, and not yet closed by the peer
        self._next = FIRST_NUMBER
        self._closed = False

    def take(self, device: int, nbytes: int) -> DeviceBlock:
        """A block of at least `nbytes`, lent from now on. Raises NoRoom."""
        key = device, block_size(nbytes)
        with self._lock:
            if self._closed:
                raise NoRoom("the connection is closed")
            idle = self._idle.get(key)
            if not idle and (lent := self._lent.get(key)):
                idle = self._look(key, lent, _LOOK_AT)
            if not idle:
                idle = self._create(*key)
            return self._lend(key, idle.pop())

    def take_read(self, device: int) -> DeviceBlock | None:
        """The smallest block, lent for its numbers alone: one that nothing is to be read from any more. Raises
        NoRoom. Usually the one that was taken last, and has been read since."""
        with self._lock:
            if self._closed:
                raise NoRoom("the connection is closed")
            block = self._reading.get(device)
            if block is None or not (block.flag.read.has_reached(block.uses) and _is_let_go(block)):
                block = self._another_to_read((device, block_size(1)))
            if block is not None:
                block.uses += 1
                block.used_at = time.monotonic()
            return block

    def _another_to_read(self, key: tuple[int, int]) -> DeviceBlock | None:
        """Under the lock: a block in the place of the one that is still being read."""
        device = key[0]
        lent = self._lent.setdefault(key, deque())
        if device in self._reading:
            lent.append(self._reading.pop(device))
        self._look(key, lent, _LOOK_AT)
        idle = self._idle.get(key) or self._create(*key)
        for place in range(len(idle) - 1, -1, -1):
            if idle[place].flag.read.has_reached(idle[place].uses):
                self._reading[device] = idle.pop(place)
                return self._reading[device]
        return None

    def _lend(self, key: tuple[int, int], block: DeviceBlock) -> DeviceBlock:
        """Under the lock: it is used once more."""
        block.uses += 1
        block.used_at = time.monotonic()
        if key not in self._lent:
            self._lent[key] = deque()
        self._lent[key].append(block)
        return block

    def _look(self, key: tuple[int, int], lent: deque[DeviceBlock], most: int) -> list[DeviceBlock]:
        """Under the lock: move what the peer has let go of, among the oldest, to the idle ones, and return these."""
        idle = self._idle.setdefault(key, [])
        for _ in range(min(most, len(lent))):
            block = lent.popleft()
            if not _is_let_go(block):
                lent.append(block)
                continue
            block.kept = ()
            idle.append(block)
        return idle

    def _create(self, device: int, size: int) -> list[DeviceBlock]:
        """Under the lock: a new slab; its blocks, all idle."""
        if self._flags is None:
            self._flags = self._make_flags()
        count = max(1, SLAB // size)
        if not self._flags.has_room(count):
            raise NoRoom("the connection has as many blocks of device memory as it can have")
        slab = Slab(device, -(-size // SLAB) * SLAB)
        self._slabs.add(slab)
        for offset in range(0, slab.size - size + 1, size):
            block = DeviceBlock(slab, self._next, self._flags.take(), offset, size)
            self._next += 1
            slab.blocks.append(block)
        idle = self._idle.setdefault((device, size), [])
        idle.extend(reversed(slab.blocks))
        return idle

    def trim(self, before: float) -> None:
        """Retire the slabs that have not been used since `before` on the monotonic clock."""
        freed = []
        with self._lock:
            for device, block in [*self._reading.items()]:
                if _is_let_go(block):
                    block.kept = ()
                if block.used_at < before:
                    self._lent.setdefault((device, block_size(1)), deque()).append(self._reading.pop(device))
            for key, lent in self._lent.items():
                self._look(key, lent, len(lent))
            for slab in list(self._slabs):
                idle = self._idle.get((slab.device, slab.blocks[0].size), [])
                mine = [block for block in idle if block.slab is slab and block.used_at < before]
                if len(mine) < len(slab.blocks):
                    continue
                idle[:] = [block for block in idle if block.slab is not slab]
                known = [block for block in mine if block.announced]
                if not known:
                    self._slabs.discard(slab)
                    freed.append(slab)
                for block in known:
                    self._closing[block.number] = block
                    self.untold.append(block.number)
        for slab in freed:
            slab.free()

    def closed(self, numbers: Iterable[int]) -> None:
        """The peer has closed these, which had been retired."""
        freed = []
        with self._lock:
            if self._closed:
                raise ConnectionResetError("the connection was closed while something was being read from it")
            for number in numbers:
                block = self._closing.pop(number, None)
                if block is None:
                    raise ProtocolError(f"the peer closed block {number} of device memory, which was not retired")
                if not any(b.number in self._closing for b in block.slab.blocks):
                    self._slabs.discard(block.slab)
                    freed.append(block.slab)
        for slab in freed:  # outside the lock: it waits for the GPU
            slab.free()

    @property
    def has_blocks(self) -> bool:
        """Whether there is a block at all."""
        return bool(self._slabs)

    def retired(self) -> tuple[int, ...]:
        """Blocks the peer should be told to close; each is named once."""
        with self._lock:
            numbers, self.untold = tuple(self.untold), []
        return numbers

    def lent(self) -> tuple[int, int]:
        """How many blocks the peer has not let go of, and their bytes."""
        with self._lock:
            blocks = [*self._reading.values(), *[block for lent in self._lent.values() for block in lent]]
        sizes = [block.size for block in blocks if not block.flag.let_go.has_reached(block.uses)]
        return len(sizes), sum(sizes)

    def close(self, peer_is_gone: Callable[[], bool]) -> None:
        """The connection has ended. The peer may still be copying, so the memory goes after a while."""
        with self._lock:
            slabs, self._slabs = self._slabs, set()
            blocks = [block for slab in slabs for block in slab.blocks]
            keep_promises([Promise(block.flag.read, block.uses) for block in blocks], peer_is_gone)
            kept = [(block.flag.read, block.uses, block.kept) for block in blocks if block.kept]
            self._lent.clear()
            self._reading.clear()
            self._idle.clear()
            self._closing.clear()
            self._closed = True
        if kept:  # and held here until it was read
            close_later(lambda: all(number.has_reached(use) for number, use, _ in kept))
        if slabs:
            free_later(slabs)


def _is_let_go(block: DeviceBlock) -> bool:
    """Whether the peer needs its memory, or what it keeps, no more."""
    flag, use = block.flag, block.uses
    return flag.let_go.has_reached(use) and (not block.kept or flag.read.has_reached(use))
