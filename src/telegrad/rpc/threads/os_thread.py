"""The end of a thread, as the system knows it.

Before Python 3.13 `Thread.join` returns when the thread has left Python. What torch keeps for each thread is freed
after that, and takes the GIL to let go of Python objects. If the interpreter is ending by then, taking the GIL ends the
thread in the middle of C++, and that ends the process ("terminate called without an active exception").
"""

import os
import threading
import time

_STEP = 0.001


def join(thread: threading.Thread, seconds: float) -> bool:
    """Wait for the end of a thread; whether it has come."""
    until = time.monotonic() + seconds
    if thread.is_alive():  # one that is about to start is nobody's concern yet
        thread.join(seconds)
    while exists(thread):
        if time.monotonic() >= until:
            return False
        time.sleep(_STEP)
    return True


def exists(thread: threading.Thread) -> bool:
    """Whether the system still has this thread."""
    return thread.is_alive() or (thread.native_id is not None and os.path.exists(f"/proc/self/task/{thread.native_id}"))
