"""Receive buffers of this process, for messages that come over a socket and are too large for the reader's buffer."""

import time
import weakref
from typing import Any

from telegrad.transport.blocks.mapping import IDLE_LIMIT, Block, block_size, count_idle_since


class Heap:
    """Receive buffers of this process, given out again once nothing aliases them."""

    def __init__(self, idle_limit: int = IDLE_LIMIT) -> None:
        self._idle_limit = idle_limit
        self._idle: dict[int, list[Block]] = {}
        self._idle_bytes = 0
        self._refs: dict[int, weakref.ref[Any]] = {}

    def allocate(self, nbytes: int) -> Any:
        """Writable memory of at least `nbytes`, as a ctypes array."""
        size = block_size(nbytes)
        idle = self._idle.get(size)
        try:
            block = idle.pop() if idle else None
        except IndexError:  # another thread took it
            block = None
        if block is None:
            block = Block(0, size)
        else:
            self._idle_bytes -= size
        alias = block.alias()
        key = id(alias)

        def freed(_: object, block: Block = block, key: int = key) -> None:
            # Runs in whichever thread drops the last tensor, possibly inside another allocation: takes no lock.
            self._refs.pop(key, None)
            if self._idle_bytes + block.size <= self._idle_limit:
                block.idle_since = time.monotonic()
                self._idle_bytes += block.size
                self._idle.setdefault(block.size, []).append(block)

        self._refs[key] = weakref.ref(alias, freed)
        return alias

    def trim(self, before: float) -> None:
        """Let go of the buffers that have been idle since `before` on the monotonic clock."""
        for idle in list(self._idle.values()):
            # Without a lock another thread may take one meanwhile; then a younger one goes, which costs only time.
            del idle[: count_idle_since(idle, before)]
        # Counted anew: two threads that change it at once may have lost one of the changes.
        self._idle_bytes = sum(size * len(idle) for size, idle in list(self._idle.items()))
