"""What connections that have ended left behind: memory of ours to free once peers have had time to copy it, memory of
peers to close once it has been copied."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

_GRACE_SECONDS = 5.0  # after a lost connection, for a peer that may still be copying


class Freed(Protocol):
    """Memory of ours."""

    def free(self) -> None:
        """Give it back."""


_left: deque[tuple[float, list[Freed]]] = deque()
_unclosed: deque[Callable[[], bool]] = deque()


def free_later(memory: Iterable[Freed]) -> None:
    """Free memory that a peer may still be copying."""
    _left.append((time.monotonic() + _GRACE_SECONDS, list(memory)))
    _collect_later()


def close_later(close_if_read: Callable[[], bool]) -> None:
    """Close memory of a peer: called again and again until it says that it has."""
    _unclosed.append(close_if_read)
    collect()
    _collect_later()


def collect() -> None:
    """Free and close what may be by now; called now and then."""
    for _ in range(len(_unclosed)):
        try:
            close_if_read = _unclosed.popleft()
        except IndexError:  # another thread does the same
            break
        if not close_if_read():
            _unclosed.append(close_if_read)
    while _left and _left[0][0] <= time.monotonic():
        try:
            _, memory = _left.popleft()
        except IndexError:
            break
        for piece in memory:
            piece.free()


def _collect_later() -> None:
    """The agent, which tidies now and then, may be gone by then."""
    timer = threading.Timer(_GRACE_SECONDS + 1.0, collect)
    timer.daemon = True
    timer.start()
