"""A value that may not be there yet: set once, or failed once, and whoever asked before is told then.

No thread has to wait for it, so an owner can leave any number of fetches open on a value that is still being made.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from telegrad.cuda import order
from telegrad.rpc.remote_errors import rebuild_exception
from telegrad.rpc.threads.interrupts import interruptible
from telegrad.rpc.threads.yield_turn import blocking

MakeError = Callable[[], BaseException]


class Outcome:
    """A value, an error, or neither yet. Whoever sets it must be the only one, or not care to be second."""

    __slots__ = ("_told", "done", "failure", "made", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.made: order.Mark | None = None  # with CUDA tensors: the streams the value was made on
        # Makes the error anew for each place that raises it: a raised exception holds on to the frames it went through.
        self.failure: MakeError | None = None
        self._told: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        state = "not there yet" if not self.done else "failed" if self.failure else type(self.value).__name__
        return f"<Outcome: {state}>"

    def set(self, value: Any) -> None:
        """The value is there."""
        if not self.done:
            if order.active:
                self.made = order.mark(value)
            self.value = value
            self._finish()

    def fail(self, failure: MakeError) -> None:
        """It will never be there."""
        if not self.done:
            self.failure = failure
            self._finish()

    def _finish(self) -> None:
        self.done = True
        self._tell()

    def _tell(self) -> None:
        # Each entry is taken by exactly one thread, whether it was added before or after the end.
        while self._told:
            try:
                tell = self._told.popleft()
            except IndexError:
                return
            tell()

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call `tell` at the end; at once if that was before now."""
        self._told.append(tell)
        if self.done:
            self._tell()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end; False if it has not come within `seconds`."""
        if not self.done:
            ended = threading.Lock()
            ended.acquire()
            self.when_done(ended.release)
            with blocking():
                return _acquire(ended, -1.0 if seconds is None else seconds)
        return True

    def get(self) -> Any:
        """The value of a finished one; raises its error if it failed."""
        if self.failure is not None:
            raise self.failure()
        if self.made is not None:
            order.follow(self.made)
        return self.value


@interruptible
def _acquire(lock: threading.Lock, seconds: float) -> bool:
    return lock.acquire(timeout=seconds)


class RemoteFailure:
    """The error of a function that ran here for others, in the form it travels in."""

    __slots__ = ("described",)

    def __init__(self, described: tuple[Any, ...]) -> None:
        self.described = described

    def __call__(self) -> BaseException:
        """The error as it is raised on this worker."""
        message, payload, *_ = self.described
        return rebuild_exception(message, payload, [])
