"""No process outlives the harness: every child calls `tie_to_harness` first.

A child that is stuck in a call, or stopped, notices no closed pipe, so the kernel does it: it kills the child when the
server it was forked from goes. That server goes once the harness, and everyone else who holds the writing end of its
pipe, is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
from multiprocessing import forkserver

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def tie_to_harness() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the harness, which ends its children itself
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # multiprocessing hands each child a copy of that writing end, for servers' grandchildren. There are none here.
    alive: int | None = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
