"""A wake-up: one thread sleeps until any other wakes it, at any time, as often as they like."""

import threading

from telegrad.rpc.threads.interrupts import interruptible


class Wakeup:
    """Set while nobody sleeps, it lets the next sleeper pass at once, one time."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while it is not set
        self._lock.acquire()

    def set(self) -> None:
        """Wake the sleeper."""
        try:
            self._lock.release()
        except RuntimeError:  # set already
            pass

    @interruptible
    def wait(self, seconds: float) -> None:
        """Sleep until it is set, or for so long."""
        self._lock.acquire(timeout=max(seconds, 0.0))
