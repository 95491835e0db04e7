"""One worker process: it joins its job, then does what the harness orders over a pipe, one order at a time.

Orders are tuples whose first element names a method of `Worker`; each is answered with ("ok", value) or ("error",
text). The process ends when the pipe closes or the harness is gone.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from benchmarks import apis, cases
from benchmarks.parent_death import tie_to_harness

WARM_UP_SHARE = 0.1


@dataclass(frozen=True)
class Place:
    """Which worker of which cluster a process is."""

    implementation: str
    rank: int
    world_size: int
    transport: str


@dataclass(frozen=True)
class Sampled:
    """Seconds of each timed step, and how many steps ran in all, warm-up included (CPU time is spent on those too)."""

    seconds: list[float]
    steps: int


def main(place: Place, orders: connection.Connection) -> None:
    """Entry point of the process."""
    # What torch says about its own deprecations is not for the reader of the table; it resets filters, hence not those.
    warnings.showwarning = lambda *_, **__: None
    tie_to_harness()
    worker = Worker(place)
    while True:
        try:
            name, *arguments = orders.recv()
        except EOFError:
            os._exit(1)
        try:
            answer: tuple[str, Any] = ("ok", getattr(worker, name)(*arguments))
        except BaseException as error:
            answer = ("error", _in_one_line(error))
        orders.send(answer)


def _in_one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Worker:
    """The orders a worker understands."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._api = apis.BY_NAME[place.implementation]
        self._prepared: tuple[str, cases.Step] | None = None
        apis.set_here(self._api)

    def load(self) -> None:
        """Import the implementation, so that no later order pays for it."""
        assert self._api.rpc

    def join(self, port: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self._api.start(self._place.rank, self._place.world_size, self._place.transport)

    def leave(self) -> None:
        self._prepared = None
        self._api.stop()

    def join_and_leave(self, port: int) -> None:
        self.join(port)
        self.leave()

    def sample(self, key: str, budget: float, least: int) -> Sampled:
        """Time the steps of a case: at least `least` steps, then as many as fit into `budget` seconds."""
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = (key, cases.BY_KEY[key].prepare(self._api))
        step = self._prepared[1]
        warm_until = time.perf_counter() + budget * WARM_UP_SHARE
        step()
        warm_up = 1
        while time.perf_counter() < warm_until:
            step()
            warm_up += 1
        samples: list[float] = []
        begun = time.perf_counter()
        while len(samples) < least or time.perf_counter() - begun < budget:
            start = time.perf_counter()
            step()
            samples.append(time.perf_counter() - start)
        return Sampled(samples, warm_up + len(samples))

    def cpu(self) -> float:
        """CPU seconds this process has used so far, all threads together."""
        return time.process_time()
