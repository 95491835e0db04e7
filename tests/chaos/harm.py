"""A cluster that is harmed on purpose: workers are killed, stopped and started again while this process uses them."""

import contextlib
import gc
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from telegrad import rpc
from telegrad.autograd.registry import registry_of
from telegrad.engine.service import PassService
from telegrad.errors import WorkerDied
from telegrad.rpc.current import require_agent
from telegrad.rref.rref_context import rrefs_of
from tests.cluster import Cluster, end, process, serve

HEARTBEAT = 1.0
MOMENT = 0.4  # seconds that a worker is stopped without being taken for dead, which it is after three heartbeats
RESTART_SECONDS = 90.0


class HarmedCluster(Cluster):
    """Workers that come back: `self.processes[i]` is the present incarnation of worker `i + 1`."""

    def __init__(self, size: int, folder: Path, **options: Any) -> None:
        self.options = {"heartbeat": HEARTBEAT, **options}
        super().__init__(size, folder, **self.options)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker."""
        pid = self.processes[self.others.index(name)].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def start_again(self, name: str) -> None:
        """Replace a worker by a new incarnation, and return when all others reach it."""
        index = self.others.index(name)
        end([self.processes[index]], patience=0)
        self.processes[index] = process(serve, name, index + 1, self.size, self.meeting, self.options)
        for asking in self.names:
            self.await_back(name, asking)

    def await_back(self, name: str, asking: str = "worker0") -> None:
        """Return when `asking` reaches a worker that was started again."""
        deadline = time.monotonic() + RESTART_SECONDS
        while not self._reaches(asking, name):
            assert time.monotonic() < deadline, f"{asking} does not find {name} again"
            time.sleep(0.02)

    def _reaches(self, asking: str, name: str) -> bool:
        try:
            if asking == self.names[0]:
                return bool(rpc.rpc_sync(name, answer))
            return asking == name or bool(rpc.rpc_sync(asking, rpc.rpc_sync, args=(name, answer)))
        except WorkerDied:
            return False


def answer() -> bool:
    """What a worker that is there returns."""
    return True


@contextlib.contextmanager
def harmed_cluster(size: int, **options: Any) -> Iterator[HarmedCluster]:
    """Such a cluster for the length of a block, all of which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="telegrad-test-") as folder:
        made = HarmedCluster(size, Path(folder), **options)
        try:
            yield made
            rpc.shutdown(timeout=60)
            end(made.processes, patience=30)
            assert [p.exitcode for p in made.processes] == [0] * len(made.processes)
        finally:
            for name in made.others:
                made.signal(name, signal.SIGCONT)
            end(made.processes, patience=0)
            with contextlib.suppress(RuntimeError):
                rpc.shutdown(graceful=False)


class Harm:
    """One act of harm, done by another thread a little later."""

    def __init__(self, made: HarmedCluster, chance: random.Random) -> None:
        self.made = made
        self.victim = chance.choice(made.others)
        self.incarnation = require_agent().find(self.victim).incarnation
        self.kind = chance.choice(["kill", "kill", "stop", "stop for a moment"])
        self.done_at = float("inf")
        self._delay = chance.choice([0.0, chance.uniform(0, 0.01), chance.uniform(0, 0.1)])
        self._thread = threading.Thread(target=self._do, daemon=True)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.victim} after {self._delay * 1000:.1f} ms>"

    @property
    def is_fatal(self) -> bool:
        """Whether the victim is lost: a stop of a moment is shorter than silence may be."""
        return self.kind != "stop for a moment"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _do(self) -> None:
        time.sleep(self._delay)
        self.made.signal(self.victim, signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        self.done_at = time.monotonic()
        if not self.is_fatal:
            time.sleep(MOMENT)
            self.made.signal(self.victim, signal.SIGCONT)


def belongings() -> dict[str, int]:
    """Called on a worker: what it has that could be left behind. Descriptors, shared memory, threads, table entries."""
    agent = require_agent()
    gc.collect()
    agent.idle_memory.tidy(before=time.monotonic())
    rrefs = rrefs_of(agent)
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
    return {
        "descriptors": len(descriptors),
        "open shared memory": sum("memfd" in name for name in descriptors),
        "mapped shared memory": Path("/proc/self/maps").read_text().count("memfd:telegrad"),
        "threads": threading.active_count(),
        "sessions": len(agent.peers.sessions()),
        "links": sum(link.connected for link in agent.peers.links()),
        "requests": len([what for what in agent.under_way() if "belongings" not in what]) - 1,  # this call aside
        "overdue": sum(bool(link.pending.given_up) for link in agent.peers.links()),
        "contexts": len(registry_of(agent)),
        "passes": len(agent.layer(PassService).passes()),
        "references": len(rrefs.owned) + len(rrefs.used) + len(rrefs.values),
    }


def _descriptors() -> list[str]:
    with os.scandir("/proc/self/fd") as entries:
        found = [entry.name for entry in entries]
    return [fd for fd in found if os.path.lexists(f"/proc/self/fd/{fd}")]
