"""Pauses threads at random calls of the project's functions, in every process, as if the system had taken them off
their core there. What depends on the order of threads fails in minutes, not once in hundreds of runs.

    PYTHONPATH=tests/pauses TELEGRAD_PAUSES=0.001 python -m pytest tests/rpc

One call in a thousand, for up to 0.1 s. Python imports a module of this name by itself if it is on the path.
"""

import os
import random
import sys
import threading
import time
from types import FrameType

_SHARE = float(os.environ.get("TELEGRAD_PAUSES", "0"))
_LONGEST = 0.1  # seconds: long enough for the timer to take a session from a thread, and for another to end its work
_sleep = time.sleep  # tests replace it
_source = random.Random()  # seeded by the system
os.register_at_fork(after_in_child=_source.seed)


def _pause(frame: FrameType, event: str, argument: object) -> None:
    if event == "call" and _source.random() < _SHARE:
        path = frame.f_code.co_filename
        if "/telegrad/" in path or "/tests/" in path:
            _sleep(_source.random() ** 2 * _LONGEST)


if _SHARE:
    sys.setprofile(_pause)
    threading.setprofile(_pause)
