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
        self._slabs: set[Slab] = set()
        self._retired: list[int] = []  # to be told to the peer
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
        NoRoom."""
        key = device, block_size(1)
        with self._lock:
            if self._closed:
                raise NoRoom("the connection is closed")
            if lent := self._lent.get(key):
                self._look(key, lent, _LOOK_AT)
            idle = self._idle.get(key) or self._create(*key)
            for place in range(len(idle) - 1, -1, -1):
                if idle[place].flag.read.has_reached(idle[place].uses):
                    return self._lend(key, idle.pop(place))
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
            if not block.flag.let_go.has_reached(block.uses) or (
                block.kept and not block.flag.read.has_reached(block.uses)
            ):
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
                    self._retired.append(block.number)
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
        """How many blocks the peer has not let go of, and their bytes."""
        with self._lock:
            blocks = [block for lent in self._lent.values() for block in lent]
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
            self._idle.clear()
            self._closing.clear()
            self._closed = True
        if kept:  # and held here until it was read
            close_later(lambda: all(number.has_reached(use) for number, use, _ in kept))
        if slabs:
            free_later(slabs)
