"""A bell: one thread sleeps until it is rung, by any other, at any time, as often as they like."""

import threading


class Bell:
    """Rung while nobody sleeps, it wakes the next one who wants to, once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while it is silent
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the sleeper."""
        try:
            self._lock.release()
        except RuntimeError:  # rung already
            pass

    def wait(self, seconds: float) -> None:
        """Sleep until it is rung, or for so long."""
        self._lock.acquire(timeout=max(seconds, 0.0))
