"""Waiting in tests: for a condition, and not for ever."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    """Return when `condition` holds; fail if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)
