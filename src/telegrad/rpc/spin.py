"""How long a thread looks again and again before it sleeps, learnt from how often looking paid.

Falling asleep and being woken costs about 50 us on each side of a call, more than a small call itself. So a thread that
expects an answer soon looks for it first. On a busy machine looking rarely pays, and the spinner then stops trying but
for a rare probe, so it never costs more than a few percent.
"""

import os
import time
from collections.abc import Callable

_SECONDS = 60e-6
_MAX_CREDIT = 16
_PROBE_EVERY = 32


class Spinner:
    """Waits a moment without sleeping, if that has paid lately."""

    __slots__ = ("_credit", "_skipped", "seconds")

    def __init__(self, seconds: float = _SECONDS) -> None:
        self.seconds = seconds
        self._credit = _MAX_CREDIT // 2
        self._skipped = 0

    def wait(self, ready: Callable[[float], bool]) -> bool:
        """True if `ready(0)` became true while looking."""
        if ready(0):
            return True
        if self._credit <= 0:
            self._skipped += 1
            if self._skipped < _PROBE_EVERY:
                return False
            self._skipped = 0
            self._credit = 1
        clock = time.perf_counter
        end = clock() + self.seconds
        pause = os.sched_yield
        while clock() < end:
            pause()  # another process on this core goes first
            if ready(0):
                if self._credit < _MAX_CREDIT:
                    self._credit += 1
                return True
        self._credit -= 1
        return False
