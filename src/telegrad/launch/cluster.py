"""A cluster around a block of code: this process becomes `worker0`, and fresh processes beside it the other workers.

    with telegrad.local_cluster(workers=3):
        y = rpc.rpc_sync("worker1", torch.mm, args=(x, w))

The others are new interpreters that run a program of Telegrad's, not the caller's script: so no `if __name__` guard is
needed, a notebook works, and functions of the script or notebook travel to them by value.
"""

import contextlib
import copy
import json
import os
import secrets
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from telegrad import rpc
from telegrad.errors import AlreadyInitialized, RendezvousError
from telegrad.launch.processes import Supervised, describe_status, end
from telegrad.launch.worker import BOOT, READY, Orders, send_orders
from telegrad.rpc.current import current_agent
from telegrad.rpc.threads.cores import variables_for

DEFAULT_SHUTDOWN_TIMEOUT = 30.0


class Cluster:
    """The processes of a local cluster, from the side of the one that started them."""

    def __init__(self, names: Sequence[str], show_output: bool, env: Mapping[str, str]) -> None:
        self.names = tuple(names)
        self._processes: dict[str, Supervised] = {}
        self._lines: dict[str, socket.socket] = {}
        self._show_output = show_output
        self._env = env

    def __repr__(self) -> str:
        return f"<Cluster of {', '.join(self.names)}>"

    @property
    def others(self) -> tuple[str, ...]:
        """The names of all workers but this process."""
        return self.names[1:]

    def pid(self, name: str) -> int:
        """The process id of a worker."""
        return os.getpid() if name == self.names[0] else self._processes[name].pid

    def kill(self, name: str) -> None:
        """Kill a worker as a crash would, to see what a program makes of it."""
        process = self._processes[name]
        process.dismissed = True
        process.kill_group()
        process.wait()

    def start(self, options: rpc.RpcBackendOptions) -> None:
        """Start the other workers, all at once, and return when each is about to join."""
        for rank, name in enumerate(self.names[1:], start=1):
            ours, theirs = socket.socketpair()
            self._lines[name] = ours
            with theirs:
                command = [sys.executable, "-u", "-c", BOOT, name, str(theirs.fileno())]
                self._processes[name] = Supervised(
                    name, command, self._env, pass_fds=[theirs.fileno()], show=self._show_output
                )
            orders = Orders(name, rank, len(self.names), options)
            with contextlib.suppress(BrokenPipeError):  # it ended at once, which the next step reports
                send_orders(ours, orders)
        self._await_ready(options.rendezvous_timeout)

    def _await_ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for name, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, name)
            while selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    late = sorted(key.data for key in selector.get_map().values())
                    raise RendezvousError(
                        f"workers {late} did not start within {seconds:g} s. Look at their output above; on a busy "
                        "machine raise `rendezvous_timeout` in the options"
                    )
                for key, _ in events:
                    if not self._is_ready(key.data):
                        raise self._ended_early(key.data)
                    selector.unregister(key.fileobj)

    def _is_ready(self, name: str) -> bool:
        try:
            return self._lines[name].recv(1) == READY
        except ConnectionResetError:  # it ended without reading its orders
            return False

    def _ended_early(self, name: str) -> RendezvousError:
        process = self._processes[name]
        process.dismissed = True
        process.wait(1.0)
        process.finish_output()
        words = "\n".join(process.last_lines) or "(nothing)"
        return RendezvousError(f"worker {name!r} {describe_status(process.status)} before it joined. It said:\n{words}")

    def wait_for_end(self, seconds: float) -> None:
        """After all have shut down: wait until the processes have ended by themselves."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.dismissed = True
            process.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the processes, whatever they do. Returns when they are gone and their output has been shown."""
        for process in self._processes.values():
            process.dismissed = True
        for line in self._lines.values():
            line.close()
        end(self._processes.values())


@contextlib.contextmanager
def local_cluster(
    workers: int = 3,
    *,
    names: Sequence[str] | None = None,
    options: rpc.RpcBackendOptions | None = None,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    show_output: bool = True,
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT,
) -> Iterator[Cluster]:
    """Make this process `worker0` of a job with `workers - 1` fresh processes beside it, for the length of a block.

    Functions and classes of the calling script or notebook can be called on the workers. What they print appears here
    with the worker's name; what they raise is raised here. The block's end waits for calls under way and ends the
    processes; an exception or Ctrl-C ends them at once, and they do not outlive this process even if it is killed.

    Args:
        workers: how many there are, this process included.
        names: what they are called, this process first; by default worker0, worker1, and so on.
        options: for all of them; where they meet and their secret are set here.
        threads: torch's threads in each started worker; by default the cores are divided among all workers, unless
            OMP_NUM_THREADS says otherwise.
        env: environment variables for the started workers, beside those of this process.
        show_output: whether what the workers print is shown.
        shutdown_timeout: seconds that calls under way at the end of the block may still take, before ShutdownError.
    """
    names = tuple(f"worker{rank}" for rank in range(workers)) if names is None else tuple(names)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a cluster needs at least one worker, and a name of its own for each; got {names}")
    if current_agent() is not None:
        raise AlreadyInitialized("this process is already a worker: call rpc.shutdown() before local_cluster()")
    environment = {**os.environ, **(env or {})}
    environment |= variables_for(len(names), environment, threads)
    environment["TELEGRAD_BOOT_PATH"] = json.dumps([p or os.getcwd() for p in sys.path])
    with tempfile.TemporaryDirectory(prefix="telegrad-") as directory:
        options = rpc.RpcBackendOptions() if options is None else copy.copy(options)
        options.init_method = Path(directory, "meeting").as_uri()
        options.secret = secrets.token_hex(32)
        cluster = Cluster(names, show_output, environment)
        try:
            cluster.start(options)
            rpc.init_rpc(names[0], rank=0, world_size=len(names), rpc_backend_options=options)
            yield cluster
            if current_agent() is not None:  # the block may have called rpc.shutdown() itself
                rpc.shutdown(timeout=shutdown_timeout)
            cluster.wait_for_end(shutdown_timeout)
        finally:
            if current_agent() is not None:
                rpc.shutdown(graceful=False)
            cluster.end()
