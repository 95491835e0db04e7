"""The harness's view of one set of workers: give orders, wait with a deadline, end them whatever happens.

Workers are forked from a server process that has torch imported, so that a set of 32 starts in a second. Each
implementation's workers have the environment that its own launcher would give them (`Api.variables`). OpenMP reads it
when torch is loaded: so there is a server for each such environment. A set that fails or misses a deadline is broken:
its processes are killed and the next case starts a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from types import TracebackType
from typing import Any, Self

from benchmarks import apis, worker
from benchmarks.parent_death import tie_to_harness
from benchmarks.worker import Place

PRELOADED = ["torch", "torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim"]
START_DEADLINE = 60.0
END_DEADLINE = 10.0
GRACE = 3.0


SETTLE, WATCH = 0.1, 0.3  # seconds after joining, and seconds of doing nothing that are watched
QUIET = 0.02  # of a core: workers that use more while idle are stopped while others are measured


class ClusterError(Exception):
    """A worker reported an error, or did not answer before the deadline."""


class Cluster:
    """Worker processes of one implementation, in one job unless `joined` is false."""

    def __init__(self, implementation: str, world_size: int, transport: str, joined: bool = True) -> None:
        context = multiprocessing.get_context("forkserver")
        self.broken = False
        self.idle: float | None = None
        self._joined = False
        self._pipes: list[connection.Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            place = Place(implementation, rank, world_size, transport)
            name = f"{implementation}-{transport}-{rank}"
            process = context.Process(target=worker.main, args=(place, theirs), name=name, daemon=True)
            with _forked_with(apis.BY_NAME[implementation].variables(world_size)):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self.order_all("load", deadline=START_DEADLINE)
            if joined:
                self.order_all("join", free_port(), deadline=START_DEADLINE)
                self._joined = True
                self.idle = self._watch_idle()
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _watch_idle(self) -> float:
        """Cores that the workers together keep busy while nothing is asked of them."""
        time.sleep(SETTLE)
        before, begun = sum(self.order_all("cpu", deadline=START_DEADLINE)), time.perf_counter()
        time.sleep(WATCH)
        after = sum(self.order_all("cpu", deadline=START_DEADLINE))
        return float(after - before) / (time.perf_counter() - begun)

    @contextmanager
    def awake(self) -> Iterator[Self]:
        """For one round: workers that poll without sleeping must not take the core from whoever is measured next."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            if self.idle is not None and self.idle > QUIET:
                self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def order(self, name: str, *arguments: Any, deadline: float) -> Any:
        """Have worker 0 do something; its answer."""
        return self._order([0], name, arguments, deadline)[0]

    def order_all(self, name: str, *arguments: Any, deadline: float) -> list[Any]:
        """Have every worker do the same thing at once; their answers by rank."""
        return self._order(range(len(self._pipes)), name, arguments, deadline)

    def _order(self, ranks: Sequence[int], name: str, arguments: tuple[Any, ...], deadline: float) -> list[Any]:
        try:
            for rank in ranks:
                self._pipes[rank].send((name, *arguments))
            return self._gather(ranks, name, time.monotonic() + deadline)
        except (OSError, EOFError):
            self.broken = True
            raise ClusterError(f"a worker died during '{name}'") from None
        except KeyboardInterrupt:
            self.broken = True
            raise

    def _gather(self, ranks: Sequence[int], name: str, ends_at: float) -> list[Any]:
        waiting = {self._pipes[rank]: rank for rank in ranks}
        answers: dict[int, Any] = {}
        failed = ""
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, ends_at - time.monotonic()))
            if not ready:
                self.broken = True
                missing = ", ".join(apis.worker_name(rank) for rank in waiting.values())
                raise ClusterError(failed or f"no answer to '{name}' in time from {missing}")
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting.pop(pipe)
                status, value = pipe.recv()
                if status == "ok":
                    answers[rank] = value
                else:
                    failed = failed or f"{apis.worker_name(rank)}: {value}"
                    # The others may wait for the one that failed: they get a moment, not the whole deadline.
                    ends_at = min(ends_at, time.monotonic() + GRACE)
        if failed:
            raise ClusterError(failed)
        return [answers[rank] for rank in ranks]

    def end(self) -> None:
        """Leave the job in order if it is whole, then end the processes: asked, then killed."""
        self._signal(signal.SIGCONT)
        if self._joined and not self.broken:
            try:
                self.order_all("leave", deadline=END_DEADLINE)
            except ClusterError:
                self.broken = True
        self._joined = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if self.broken:
                process.kill()
        ends_at = time.monotonic() + END_DEADLINE
        for process in self._processes:
            process.join(max(0.0, ends_at - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


_servers: dict[tuple[tuple[str, str], ...], forkserver.ForkServer] = {}


@contextmanager
def _forked_with(variables: dict[str, str]) -> Iterator[None]:
    """Within, processes are forked from a server that was started with these variables."""
    server = _server(variables)
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual


def _server(variables: dict[str, str]) -> forkserver.ForkServer:
    key = tuple(sorted(variables.items()))
    if key not in _servers:
        server = _servers[key] = forkserver.ForkServer() if variables else forkserver._forkserver
        server.set_forkserver_preload(PRELOADED)
        before = dict(os.environ)
        # It inherits that Ctrl-C is ignored: interrupted in the middle of an import, it would only print a traceback.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            os.environ.update(variables)
            server.ensure_running()
        finally:
            for name in variables.keys() - before.keys():
                del os.environ[name]
            signal.signal(signal.SIGINT, previous)
    return _servers[key]


def preload() -> None:
    """Have the process that workers are forked from import torch; before the first of them starts."""
    _server({})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def burn() -> None:
    """Keep one core busy until killed."""
    tie_to_harness()
    while True:
        sum(range(10_000))
