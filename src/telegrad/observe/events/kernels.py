"""What the GPU does during a recording, from torch's profiler (Kineto over CUPTI): kernels, copies and fills by stream.

Only device activity is asked for: it is that of the whole process, whichever threads launch it, and no operator of the
host is looked at. The session begins and ends in one thread of its own, as torch wants. There is one in a process at a
time: where the program profiles CUDA itself, or a process has not used CUDA, nothing is recorded here. What a session
holds cannot be taken out before its end, so it ends after a while: the memory it takes is bounded.
"""

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

log = logging.getLogger("telegrad.observe")

MOST_SECONDS = 60.0
MOST_KERNELS = 200_000
_START_SECONDS = 20.0  # CUPTI takes its time when it is loaded
_SAMPLES = 16


class Kernel(msgspec.Struct, array_like=True, tag="k"):
    """Something that ran on a GPU."""

    since: float
    end: float
    name: str
    device: int
    stream: int


class Kernels:
    """A session of the profiler, in its own thread."""

    def __init__(self) -> None:
        self.lost = 0
        self._begun, self._end = threading.Event(), threading.Event()
        self._found: list[Kernel] = []
        self._thread = threading.Thread(target=self._run, name="telegrad-kernels", daemon=True)

    def start(self) -> None:
        """Begin, and return when the GPU is being watched."""
        self._thread.start()
        if not self._begun.wait(_START_SECONDS):
            log.warning("the profiler of CUDA kernels has not begun within %g s", _START_SECONDS)

    def stop(self) -> list[Kernel]:
        """End; what ran."""
        self._end.set()
        self._thread.join(_START_SECONDS)
        return self._found

    def _run(self) -> None:
        try:
            options: Any = profile(use_cpu=False, use_device="cuda", use_kineto=True)
            torch._C._autograd._prepare_profiler(options.config(), options.kineto_activities)
            torch._C._autograd._enable_profiler(options.config(), options.kineto_activities)
        except (RuntimeError, AssertionError, AttributeError) as error:
            log.info("CUDA kernels are not recorded: %s", error)
            return
        finally:
            self._begun.set()
        self._end.wait(MOST_SECONDS)
        torch.cuda.synchronize()  # what was launched is to be whole
        events = torch._C._autograd._disable_profiler().events()
        self._found, self.lost = on_device(events, wall_clock_ahead())


def can_record() -> bool:
    """Whether this process uses a GPU, and torch's profiler sees what it does."""
    has_begun: Any = torch.cuda.is_initialized  # torch gives neither a type
    supported: Any = torch.profiler.supported_activities
    return bool(has_begun() and torch.profiler.ProfilerActivity.CUDA in supported())


def wall_clock_ahead() -> float:
    """Seconds by which the clock of the profiler's events, the time of day, is ahead of `time.monotonic`."""
    found = []
    for _ in range(_SAMPLES):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        found.append((after - before, wall - (before + after) / 2))
    return min(found)[1]


def on_device(events: Iterable[Any], ahead: float, most: int = MOST_KERNELS) -> tuple[list[Kernel], int]:
    """What ran on a GPU, by the clock of this process, of a profiler's events; and how many there was no room for."""
    found = [event for event in events if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()]
    return [
        Kernel(
            event.start_ns() * 1e-9 - ahead,
            (event.start_ns() + event.duration_ns()) * 1e-9 - ahead,
            event.name(),
            event.device_index(),
            event.device_resource_id(),
        )
        for event in found[:most]
    ], max(0, len(found) - most)
