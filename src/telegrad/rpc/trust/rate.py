"""So many in a second and no more: what a stranger or a peer may cost, and how often that is said."""

import logging
import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Allows `rate` a second, and a burst of `burst` after a pause."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._burst = burst
        self._tokens = burst
        self._clock = clock
        self._since = clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether one more is allowed now; it counts then."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._since) * self.rate)
            self._since = now
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True


class LimitedLog:
    """Warnings that others can cause: the first ones are shown, then one now and then with the number left out."""

    def __init__(self, log: logging.Logger, *, burst: int = 20, seconds: float = 10.0) -> None:
        self._log = log
        self._bucket = TokenBucket(1.0 / seconds, burst)
        self._left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Say it, unless too much was said already."""
        if not self._bucket.take():
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        if left_out:
            text, args = text + " (and %d more warnings of this kind before it)", (*args, left_out)
        self._log.warning(text, *args)
