"""`record`: collects the events of all workers while a block runs, and writes one timeline of them.

Events are fetched twice a second, so a worker that dies takes only its last ones with it, and no worker keeps many. A
worker that joins meanwhile is asked to record, too.
"""

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from telegrad.errors import TelegradError
from telegrad.observe.asking import ask, ask_all
from telegrad.observe.events.records import AnyEvent, decode_batch, decode_events, readable
from telegrad.observe.service import clock, observation_of
from telegrad.observe.timeline.chrome import Track, build
from telegrad.observe.timeline.clocks import Ping
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.workers import Member

log = logging.getLogger("telegrad.observe")

_COLLECT_SECONDS = 0.5
_PINGS = 8
_KERNEL_SECONDS = 30.0  # for CUPTI, which takes its time at the beginning
_MOST_EVENTS = 5_000_000


class _Collected(msgspec.Struct):
    """What one incarnation of a worker has told."""

    member: Member
    # Read at the end, so that the job is not held up: of others as they came, of this worker as they were recorded.
    batches: list[bytes] = msgspec.field(default_factory=list)
    own: list[Any] = msgspec.field(default_factory=list)
    count: int = 0
    threads: dict[int, str] = {}
    pings: list[Ping] = []
    lost: int = 0

    def events(self) -> list[AnyEvent]:
        """All of them."""
        return [event for batch in self.batches for event in decode_events(batch)] + readable(self.own)


class Recording:
    """The recording of one block, from the worker that asked for it."""

    def __init__(self, agent: Agent, kernels: bool = True) -> None:
        self._agent = agent
        self._kernels = kernels
        self._watcher = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._found: dict[int, _Collected] = {}
        self._total = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._collect_often, name="telegrad-recording", daemon=True)

    def start(self) -> None:
        """All workers record from here on."""
        self._welcome()
        self._thread.start()

    def stop(self) -> None:
        """Collect what is left, and let the workers record no more."""
        self._ended.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()
        if self._kernels:
            observation_of(self._agent).kernels_of(self._watcher)
            ask_all(self._agent, self._others(), "end kernels", self._watcher.encode(), _KERNEL_SECONDS)
        self._collect()
        for collected in list(self._found.values()):
            self._ping(collected)
        agent = self._agent
        observation_of(agent).unwatch(self._watcher)
        ask_all(agent, self._others(), "stop", self._watcher.encode())

    def collected(self, worker: str) -> int:
        """How many events of a worker are here already, and cannot be lost with it."""
        return sum(c.count for c in self._found.values() if c.member.name == worker)

    def write(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Write what was collected; returns it as well."""
        tracks = [
            Track(
                int(c.member.worker_id), c.member.incarnation, c.member.name, c.member.pid, c.events(), c.threads
            )._replace(pings=c.pings, lost=c.lost)
            for c in sorted(self._found.values(), key=lambda c: c.member.worker_id)
        ]
        timeline = build(tracks, self._agent.member.incarnation)
        with Path(path).open("w") as file:
            json.dump(timeline, file)
        return timeline

    # --- collecting ---

    def _others(self) -> list[Member]:
        agent = self._agent
        return [m for m in agent.peers.everyone() if m.worker_id != agent.member.worker_id and not agent.is_dead(m)]

    def _welcome(self) -> None:
        """Ask those to record that were not asked yet."""
        agent = self._agent
        if agent.member.incarnation not in self._found:
            self._found[agent.member.incarnation] = _Collected(agent.member)
            observation_of(agent).watch(self._watcher)
            if self._kernels:
                observation_of(agent).want_kernels(self._watcher)
        new = [member for member in self._others() if member.incarnation not in self._found]
        answers = ask_all(agent, new, "record", self._watcher.encode())
        if self._kernels:
            ask_all(agent, new, "kernels", self._watcher.encode(), _KERNEL_SECONDS)
        for member in new:
            if answers[member.incarnation] is not None:
                collected = self._found[member.incarnation] = _Collected(member)
                self._ping(collected)

    def _ping(self, collected: _Collected) -> None:
        if collected.member.incarnation == self._agent.member.incarnation or self._agent.is_dead(collected.member):
            return
        with contextlib.suppress(TelegradError, OSError):
            for _ in range(_PINGS):
                left = time.monotonic()
                theirs = clock(ask(self._agent, collected.member, "clock"))
                collected.pings.append(Ping(left, theirs, time.monotonic()))

    def _collect_often(self) -> None:
        while not self._ended.wait(_COLLECT_SECONDS) and not self._agent.closing:
            try:
                self._agent.peers.look_for_news()  # who was started again is to record, too
                self._welcome()
                self._collect()
            except TelegradError as error:
                log.debug("collecting the events of other workers failed: %s", error)

    def _collect(self) -> None:
        agent = self._agent
        with self._lock:
            others = [c.member for c in self._found.values() if c.member.incarnation != agent.member.incarnation]
            events, threads, lost = observation_of(agent).take(self._watcher)
            own = self._found[agent.member.incarnation]
            if self._take(own, len(events), threads, lost):
                own.own.extend(events)
            for data in ask_all(agent, others, "collect", self._watcher.encode()).values():
                if data is not None:
                    batch = decode_batch(data)
                    collected = self._found[batch.incarnation]
                    if self._take(collected, batch.count, batch.threads, batch.lost):
                        collected.batches.append(batch.events)

    def _take(self, collected: _Collected, count: int, threads: dict[int, str], lost: int) -> bool:
        """Note that events came; whether there is room for them."""
        fits = self._total + count <= _MOST_EVENTS
        collected.count += count if fits else 0
        collected.lost += lost if fits else lost + count
        collected.threads = {**collected.threads, **threads}
        self._total += count
        return fits


@contextlib.contextmanager
def record(path: str | os.PathLike[str], *, kernels: bool = True) -> Iterator[Recording]:
    """Record what all workers do while the block runs, and write it to `path` as one timeline.

    The file opens in https://ui.perfetto.dev and in chrome://tracing: a process for each worker, a track for each of
    its threads, and arrows from each call to where it was served, and from each Recv to its Send. The clocks of the
    workers are aligned; how well is in the file, under `otherData`.

    Args:
        path: of the file.
        kernels: whether what the GPUs do is recorded as well, for the first minute. torch has one profiler of CUDA in a
            process: False leaves it to the program.

    Examples:
        >>> with telegrad.observe.record("step.json"):
        ...     rpc.rpc_sync("worker1", abs, (-1,))
        1
    """
    recording = Recording(require_agent(), kernels)
    with open(path, "ab"):
        pass  # what cannot be written there is an error now, and not when all has been recorded
    recording.start()
    try:
        yield recording
    finally:
        recording.stop()
        recording.write(path)
