"""One gathering of values from several workers: it is told what came and who ended, and says when the wait is over.

Nothing is sent from here; `api.py` does that. torch waits for a worker that is gone; here its end ends the wait.
"""

import threading
from collections.abc import Iterable
from typing import Any

from telegrad.errors import WorkerDied


class AllGatherStates:
    """What one worker knows of one gathering. Its user locks: threads that serve calls tell it things, too."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()  # set when the wait here is over
        self.failure: WorkerDied | None = None
        self.awaited: set[str] = set()
        self._without_dead = False

    def wait_for(self, names: Iterable[str], *, without_dead: bool) -> None:
        """This worker has come to wait, for these. One of them that ends is passed over, or ends the gathering."""
        self._without_dead = without_dead
        self.awaited = set(names)
        self._settle()

    def arrived(self, name: str, obj: Any) -> None:
        """The contribution of one worker."""
        self.gathered_objects[name] = obj
        self._no_longer_awaited(name)

    def lost(self, name: str) -> None:
        """A worker is gone."""
        if name in self.awaited and not self._without_dead and not self.proceed_signal.is_set():
            self.failure = WorkerDied(
                f"worker {name!r} is gone, and _all_gather waited for it; repeat it without that worker", worker=name
            )
        self._no_longer_awaited(name)

    def fail(self, failure: WorkerDied) -> None:
        """Nothing will come of it."""
        self.failure = failure
        self.awaited.clear()
        self.proceed_signal.set()

    def _no_longer_awaited(self, name: str) -> None:
        if name in self.awaited:
            self.awaited.discard(name)
            self._settle()

    def _settle(self) -> None:
        if self.failure is not None or not self.awaited:
            self.awaited.clear()
            self.proceed_signal.set()
