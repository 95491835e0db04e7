"""How long a thread looks again and again before it sleeps, learnt from how long such waits have taken.

Falling asleep and being woken costs 50 to 100 us on each side of a call, more than a small call itself. So a thread that
expects its answer within a few hundred microseconds looks for it first. Where answers take longer it sleeps at once, but
for a rare probe. It always lets other processes on its core go first, and does not look while another thread of this
process has work: those would need the interpreter that it keeps busy.
"""

import os
import time
from collections.abc import Callable

LIMIT = 400e-6  # longer waits are slept through: the cost of waking is then a small part
_MARGIN = 20e-6
_PROBE_EVERY = 32


class Spinner:
    """Waits a moment without sleeping, if that is likely to be enough."""

    __slots__ = ("_expected", "_skipped")

    def __init__(self) -> None:
        self._expected = LIMIT / 4
        self._skipped = 0

    def wait(self, ready: Callable[[float], bool], disturbs: Callable[[], bool]) -> bool:
        """True if `ready(0)` became true while looking; False at once if that `disturbs` others."""
        if ready(0):
            return True
        expected = self._expected
        if expected > LIMIT:
            self._skipped += 1
            if self._skipped < _PROBE_EVERY:
                return False
            self._skipped = 0
        clock = time.perf_counter
        start = clock()
        end = start + min(LIMIT, 2 * expected + _MARGIN)
        pause = os.sched_yield
        while (now := clock()) < end:
            if disturbs():
                return False
            pause()
            if ready(0):
                elapsed = now - start
                self._expected = elapsed if expected > LIMIT else expected + (elapsed - expected) / 8
                return True
        self._expected = min(1.25 * expected + _MARGIN, 2 * LIMIT)
        return False
