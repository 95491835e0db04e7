"""Real worker processes for tests: the test itself is worker `worker0`, the others serve until it lets them go.

Workers are forked from a server process that has imported torch once, so that a cluster of sixteen starts in a second.
They end with the cluster whatever happens: by a graceful shutdown together with the test, or killed.
"""

import contextlib
import itertools
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from telegrad import rpc

# The ways between two workers: what is forced by options, under the name a test is shown with.
WAYS: dict[str, dict[str, Any]] = {
    "unix-shm": {"transports": ("unix",), "shared_memory": True},
    "unix": {"transports": ("unix",), "shared_memory": False},
    "tcp": {"transports": ("tcp",)},
}

_meetings = itertools.count()
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "telegrad.rpc", "telegrad.autograd", "telegrad.durable"])


def process(target: Any, *args: Any) -> BaseProcess:
    """A started process that runs `target(*args)`."""
    made = _server.Process(target=target, args=args, daemon=True)
    made.start()
    return made


class Cluster:
    """The test and its workers. `processes[i]` is worker `i + 1`."""

    def __init__(self, size: int, folder: Path, **options: Any) -> None:
        self.size = size
        self.names = [f"worker{rank}" for rank in range(size)]
        self.others = self.names[1:]
        self.meeting = f"file://{folder}/meeting{next(_meetings)}"
        self.processes = [process(serve, name, rank, size, self.meeting, options) for rank, name in self._ranks()]
        try:
            join("worker0", 0, size, self.meeting, options)
        except BaseException:
            end(self.processes, patience=0)
            raise

    def _ranks(self) -> list[tuple[int, str]]:
        return list(enumerate(self.others, start=1))

    def kill(self, name: str) -> None:
        """End one worker as a crash would."""
        victim = self.processes[self.others.index(name)]
        victim.kill()
        victim.join()


@contextlib.contextmanager
def cluster(size: int, **options: Any) -> Iterator[Cluster]:
    """A cluster for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="telegrad-test-") as folder:
        made = Cluster(size, Path(folder), **options)
        graceful = False
        try:
            yield made
            graceful = all(p.is_alive() for p in made.processes)
        finally:
            try:
                rpc.shutdown(graceful=graceful, timeout=60)
            finally:
                end(made.processes, patience=60 if graceful else 0)


def join(name: str, rank: int, size: int | None, meeting: str, options: dict[str, Any]) -> None:
    """Become a worker of the job that meets at `meeting`."""
    given = rpc.RpcBackendOptions(**{"init_method": meeting, "rendezvous_timeout": 120, **options})
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=given)


def serve(name: str, rank: int, size: int, meeting: str, options: dict[str, Any]) -> None:
    """A worker that does what others ask until all shut down."""
    import torch

    torch.set_num_threads(1)
    join(name, rank, size, meeting, options)
    rpc.shutdown()


def end(processes: list[BaseProcess], patience: float) -> None:
    """Wait for processes that are ending, and end those that are not."""
    for each in processes:
        each.join(patience)
        if each.is_alive():
            each.kill()
        each.join()
