"""How long a thread spins before it sleeps, learnt from how long such waits have taken.

Falling asleep and being woken costs 50 to 100 us on each side of a call, more than a small call itself. So a thread
that expects its answer within a few hundred microseconds spins first. Where answers take longer it sleeps at once, but
for a rare probe. It lets other processes on its core go first, and does not spin for a while when that shows that the
machine is busy. Nor does it while another thread of this process has work: that needs the interpreter.
"""

import os
import time
from collections.abc import Callable
from typing import Protocol

from telegrad.cuda import order
from telegrad.rpc.threads.yield_turn import local

LIMIT = 400e-6  # longer waits are slept through: the cost of waking is then a small part
_LIMIT_WITH_GPU = (
    4e-3  # steps with CUDA tensors take a few times as long as those of the host, and longer after a sleep
)
_MARGIN = 20e-6
_PROBE_EVERY = 32
_ANOTHER_RAN = 200e-6  # a look that takes so long has let another process run: there are more of them than cores
_REST = 4  # waits to sleep through then


class Working(Protocol):
    """Threads that spinning would disturb."""

    working: int  # how many have work


class Spinner:
    """Waits a moment without sleeping, if that is likely to be enough."""

    __slots__ = ("_expected", "_resting", "_skipped")

    def __init__(self) -> None:
        self._expected = LIMIT / 4
        self._skipped = 0
        self._resting = 0

    def wait(self, ready: Callable[[float], bool], io_threads: Working) -> bool:
        """True if `ready(0)` became true while looking; False at once if I/O threads other than this one have work."""
        if ready(0):
            return True
        if self._resting:
            self._resting -= 1
            return False
        expected = self._expected
        limit = _LIMIT_WITH_GPU if order.active else LIMIT
        if expected > limit:
            self._skipped += 1
            if self._skipped < _PROBE_EVERY:
                return False
            self._skipped = 0
        clock = time.perf_counter
        start = clock()
        now = start
        end = start + min(limit, 2 * expected + _MARGIN)
        pause = os.sched_yield
        most = 0 if local.turn is None else 1  # this thread may be one of the I/O threads
        while now < end:
            if io_threads.working > most:
                return False
            pause()
            if ready(0):
                elapsed = now - start
                self._expected = elapsed if expected > limit else expected + (elapsed - expected) / 8
                return True
            before, now = now, clock()
            if now - before > _ANOTHER_RAN:
                self._resting = _REST
                return False
        self._expected = min(1.25 * expected + _MARGIN, 2 * limit)
        return False
