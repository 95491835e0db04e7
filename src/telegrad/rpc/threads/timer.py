"""The timer: one thread per agent for all deadlines. It runs no user code and never waits for a peer.

It sleeps until the earliest moment somebody asked for. Deadlines of futures, heartbeats and the look at threads that
are stuck in a user's function all come from here; what they lead to is done by the I/O threads.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from telegrad.rpc.threads import os_thread
from telegrad.rpc.threads.wakeup import Wakeup

log = logging.getLogger("telegrad.rpc")

_FOREVER = 3600.0


class Timer:
    """Calls functions at given times."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._wakeup = Wakeup()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._next = float("inf")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-timer", daemon=True)

    def start(self) -> None:
        """Start keeping time."""
        self._thread.start()

    def at(self, when: float, task: Callable[[], None]) -> None:
        """Call `task` at `when` on the monotonic clock. The task must be quick."""
        with self._lock:
            heapq.heappush(self._heap, (when, next(self._order), task))
            earlier = when < self._next
            if earlier:
                self._next = when
        if earlier:
            self._wakeup.set()

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            due = []
            with self._lock:
                while self._heap and self._heap[0][0] <= now:
                    due.append(heapq.heappop(self._heap)[2])
                self._next = self._heap[0][0] if self._heap else float("inf")
                pause = min(self._next - now, _FOREVER)
            for task in due:
                try:
                    task()
                except Exception:
                    log.exception("a timed task failed; the timer goes on")
            if not due:
                self._wakeup.wait(pause)

    def close(self) -> None:
        """Stop; tasks not yet due are dropped."""
        self._closed = True
        self._wakeup.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            os_thread.join(self._thread, 1.0)
