"""How long a thread spins before it sleeps, learnt from how long such waits have taken.

Falling asleep and being woken costs 50 to 100 us on each side of a call, more than a small call itself, and where every
thread sleeps the cores do too, which makes the next wake-up dearer. So a thread that expects its answer within two
milliseconds spins first. Where answers take longer it sleeps at once, but for a rare probe.

It lets other processes on its core go first. It does not spin while another thread of this process has work, which
needs the interpreter: the I/O threads say so themselves; that one of the user's has is seen by the time that this
process spends and this thread does not.
"""

import os
import time
from collections.abc import Callable
from typing import Protocol

from telegrad.cuda import order
from telegrad.rpc.threads.yield_turn import local

LIMIT = 2e-3  # longer waits are slept through: the cost of waking is then a small part
_LIMIT_WITH_GPU = 4e-3  # steps with CUDA tensors take a few times as long as those of the host
_FIRST = 100e-6  # what is expected before anything has been learnt
_MARGIN = 20e-6
_PROBE_EVERY = 32
_HELD_UP = 2e-3  # a look that takes so long had to wait: for the interpreter, or for other processes
_REST = 4  # waits to sleep through then
_SAMPLE_EVERY = 8  # waits of which one looks whether other threads of this process work
_LEAST_SAMPLE = 20e-6  # seconds of a wait that says something about that
_OTHERS_WORK = 0.2  # the share of a wait that they work, if they do; in two samples, for the timer works now and then
_LONG_REST = 64


class Working(Protocol):
    """Threads that spinning would disturb."""

    working: int  # how many have work


def _spent_by_others() -> float:
    """CPU seconds that the other threads of this process have spent."""
    return time.process_time() - time.thread_time()


class Spinner:
    """Waits a moment without sleeping, if that is likely to be enough."""

    __slots__ = ("_expected", "_others_worked", "_resting", "_skipped", "_to_sample")

    def __init__(self) -> None:
        self._expected = _FIRST
        self._skipped = 0
        self._resting = 0
        self._to_sample = _SAMPLE_EVERY
        self._others_worked = False

    def wait(self, ready: Callable[[float], bool], io_threads: Working) -> bool:
        """True if `ready(0)` became true while looking; False at once if I/O threads other than this one have work."""
        if ready(0):
            return True
        if self._resting:
            self._resting -= 1
            return False
        limit = _LIMIT_WITH_GPU if order.active else LIMIT
        if self._expected > limit:
            self._skipped += 1
            if self._skipped < _PROBE_EVERY:
                return False
            self._skipped = 0
        self._to_sample -= 1
        if self._to_sample:
            return self._spin(ready, io_threads, limit)
        self._to_sample = _SAMPLE_EVERY
        before, begun = _spent_by_others(), time.perf_counter()
        came = self._spin(ready, io_threads, limit)
        elapsed = time.perf_counter() - begun
        if elapsed > _LEAST_SAMPLE:
            work = _spent_by_others() - before > _OTHERS_WORK * elapsed
            if work:
                self._to_sample = 1
                if self._others_worked:
                    self._resting = _LONG_REST
            self._others_worked = work
        return came

    def _spin(self, ready: Callable[[float], bool], io_threads: Working, limit: float) -> bool:
        expected = self._expected
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
            if now - before > _HELD_UP:
                self._resting = _REST
                return False
        self._expected = min(1.25 * expected + _MARGIN, 2 * limit)
        return False
