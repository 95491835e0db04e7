"""Ctrl-C at a random moment: it is raised where a call waits, or in the user's own code, and nowhere in between.

A KeyboardInterrupt may come between any two lines of the main thread, also between taking a slot out of a table and
completing it. No code can be right against that. So while the main thread is inside Telegrad, an interrupt waits for
the next place where Telegrad itself would wait (marked `interruptible`), or until it is back in the user's code. That
costs calls nothing: the signal's handler looks at the stack, and has the signal sent again a moment later.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_OWN_CODE = str(Path(__file__).parents[2]) + os.sep
_AGAIN_SECONDS = 0.001
_MOST_SECONDS = 3.0  # if it finds no such place for so long, it is raised wherever it is

_waits: set[CodeType] = set()


def interruptible(function: F) -> F:
    """Mark a function that waits, and in which an interrupt does no harm at any line."""
    code = getattr(function, "__code__", None)
    if code is not None:
        _waits.add(code)
    return function


@interruptible
def pause(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


def may_interrupt(frame: FrameType | None) -> bool:
    """Whether an exception may be raised at this point of a thread."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OWN_CODE):
            return frame.f_code in _waits
        frame = frame.f_back
    return True


class _Handler:
    """Stands before the handler that was there, and lets it have the signal when it may."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before
        self._since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        now = time.monotonic()
        if may_interrupt(frame) or (self._since and now - self._since > _MOST_SECONDS):
            self._since = 0.0
            return self.before(number, frame)
        self._since = self._since or now
        again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, number))
        again.daemon = True
        again.start()
        return None


def install() -> None:
    """Have interrupts wait while this process is a worker, if it is the main thread that makes it one."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGINT)
    if callable(before) and not isinstance(before, _Handler):
        signal.signal(signal.SIGINT, _Handler(before))


def uninstall() -> None:
    """Put back what was there, unless somebody else has a handler now."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler.before)
