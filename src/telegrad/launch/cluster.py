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
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from telegrad import rpc
from telegrad.errors import AlreadyInitialized, RendezvousError
from telegrad.launch.processes import Supervised, describe_status, end, say
from telegrad.launch.worker import BOOT, READY, Orders, send_orders
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.job.lifecycle import first_at_exit
from telegrad.rpc.threads.cores import variables_for
from telegrad.rpc.torch_modes import seeds

DEFAULT_SHUTDOWN_TIMEOUT = 30.0
_EXIT_SECONDS = 3.0  # the same for a block that is open when the program ends; Jupyter kills a kernel that takes five
_MOST_EARLY_ENDS = 3  # starts in a row that end before the worker has joined, after which it is not started again


class Cluster:
    """The processes of a local cluster, from the side of the one that started them.

    After `start_restarting`, a worker that ends otherwise than by a shutdown is started again by the thread that saw
    it end; the lock guards the table of processes against that thread.

    A block that is open when the program ends is ended by `end_with_program`, while threads run. The interpreter would
    leave the block only when it clears its modules: daemon threads stand still by then, and the one that waits for a
    process keeps the lock that everybody else needs to learn of its end.

    Examples:
        >>> with telegrad.local_cluster(workers=3) as cluster:
        ...     cluster.others
        ('worker1', 'worker2')
    """

    def __init__(self, names: Sequence[str], show_output: bool, env: Mapping[str, str]) -> None:
        self.names = tuple(names)
        self.dashboard = ""  # the address of its live page, if it has one
        self.is_over = False  # whether it has been ended
        self.directory = tempfile.mkdtemp(prefix="telegrad-")
        self._page = contextlib.ExitStack()
        self._owner = os.getpid()
        self._thread = threading.current_thread()
        self._processes: dict[str, Supervised] = {}
        self._lines: dict[str, socket.socket] = {}
        self._show_output = show_output
        self._env = env
        self._restarting = False
        self._early_ends: dict[str, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Cluster of {', '.join(self.names)}>"

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and not its parent."""
        return os.getpid() == self._owner

    @property
    def others(self) -> tuple[str, ...]:
        """The names of all workers but this process."""
        return self.names[1:]

    def pid(self, name: str) -> int:
        """The process id of a worker."""
        return os.getpid() if name == self.names[0] else self._processes[name].pid

    def kill(self, name: str) -> None:
        """Kill a worker as a crash would, to see what a program makes of it."""
        self._processes[name].kill()

    def start(self, options: rpc.RpcBackendOptions) -> None:
        """Start the other workers, all at once, and return when each is about to join."""
        self._options = options
        with self._lock:
            for name in self.others:
                self._start_worker(name)
        self._await_ready(options.rendezvous_timeout)

    def _start_worker(self, name: str) -> None:
        ours, theirs = socket.socketpair()
        self._lines[name] = ours
        with theirs:
            command = [sys.executable, "-u", "-c", BOOT, name, str(theirs.fileno())]
            self._processes[name] = Supervised(
                name, command, self._env, pass_fds=[theirs.fileno()], show=self._show_output, on_end=self._ended
            )
        orders = Orders(name, self.names.index(name), len(self.names), self._options)
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which whoever waits for it reports
            send_orders(ours, orders)

    def _ended(self, process: Supervised) -> None:
        """A worker's process has ended; called by the thread that waited for it."""
        name = process.name
        agent = current_agent()
        if agent is not None and self._restarting:
            agent.peers.look_for_news()  # it may have joined without having been called since
        with self._lock:
            if not self._restarting or process.status == 0 or self._processes.get(name) is not process:
                return
            early = self._early_ends.get(name, 0) + 1 if self._ended_before_joining(name) else 0
            self._early_ends[name] = early
            self._lines.pop(name).close()
            if early < _MOST_EARLY_ENDS:
                self._start_worker(name)
                return
        say(name, f"ended {early} times before it had joined, and is not started again", "stderr")

    def _ended_before_joining(self, name: str) -> bool:
        agent = current_agent()
        known = None if agent is None else agent.directory.by_name(name)
        return known is None or known.pid != self._processes[name].pid

    def start_restarting(self) -> None:
        """All have joined: from now on a worker that ends is started again."""
        self._restarting = True
        for process in list(self._processes.values()):
            if process.status is not None:
                self._ended(process)

    def stop_restarting(self) -> None:
        """The block is over: nobody is started again, and whoever was on its way to join is not waited for."""
        with self._lock:
            if not self._restarting:
                return
            self._restarting = False
        agent = current_agent()
        if agent is not None:
            agent.peers.look_for_news()
        for name, process in self._processes.items():
            if agent is None or self._ended_before_joining(name):
                process.dismissed = True
                process.kill_group()

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

    def open_page(self) -> None:
        """Serve a live page of the job, as long as the cluster lasts."""
        from telegrad.observe.live.page import serving  # noqa: PLC0415 - with packages that only this needs

        self.dashboard = self._page.enter_context(serving(require_agent())).url
        print(f"the dashboard is at {self.dashboard}", flush=True)

    def shut_down(self, seconds: float) -> None:
        """Wait for calls under way, leave the job with all others, and wait until they have ended by themselves. A
        forked child, which leaves the block as well, has none of this to do: its calls and processes are its parent's.
        """
        if not self.is_ours:
            return
        self._page.close()
        self.stop_restarting()
        if current_agent() is not None:  # the block may have called rpc.shutdown() itself
            rpc.shutdown(timeout=seconds)
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.dismissed = True
            process.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End this worker and the processes, whatever they do. Returns when they are gone and their output has been
        shown. A forked child of the process that made them leaves them alone."""
        if self.is_over or not self.is_ours:
            return
        self.is_over = True
        try:
            self._page.close()
            if current_agent() is not None:
                rpc.shutdown(graceful=False)
            self.stop_restarting()
        finally:
            self._let_go()
            end(self._processes.values())
            shutil.rmtree(self.directory, ignore_errors=True)

    def _let_go(self) -> None:
        """The processes end by themselves, as soon as they see that nobody holds their line."""
        self._restarting = False
        for process in self._processes.values():
            process.dismissed = True
        for line in self._lines.values():
            line.close()

    def end_with_program(self, ended_well: bool) -> None:
        """The program ends, and the block is still open. An error ends it at once, as it would have in the block."""
        if not self.is_ours:
            return
        if self._thread is not threading.main_thread() and self._thread.is_alive():
            # A daemon thread is in its block to the last and never reaches its end; what it waits for fails.
            self.is_over = True
            self._let_go()
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        try:
            if ended_well:
                self.shut_down(_EXIT_SECONDS)
        except Exception as error:  # this is nobody's call any more, so nobody could catch it
            say(self.names[0], f"a local_cluster was open when the program ended: {error}", "stderr")
        finally:
            self.end()


@contextlib.contextmanager
def local_cluster(
    workers: int = 3,
    *,
    names: Sequence[str] | None = None,
    options: rpc.RpcBackendOptions | None = None,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    show_output: bool = True,
    restart: bool = False,
    seed: int | None = None,
    dashboard: bool = False,
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT,
) -> Iterator[Cluster]:
    """Make this process `worker0` of a job with `workers - 1` fresh processes beside it, for the length of a block.

    Functions and classes of the calling script or notebook can be called on the workers, as they are at the time of the
    call. What they print appears here with the worker's name; what they raise is raised here. The block's end waits for
    calls under way and ends the processes; an exception or Ctrl-C ends them at once, and they do not outlive this
    process even if it is killed.

    A notebook or a prompt keeps a cluster over cells with `block = local_cluster()`, `cluster = block.__enter__()` and,
    when it is done, `block.__exit__(None, None, None)`. One that is open when the program ends is shut down then, with
    three seconds for calls under way.

    Args:
        workers: how many there are, this process included.
        names: what they are called, this process first; by default worker0, worker1, and so on.
        options: for all of them; where they meet and their secret are set here.
        threads: torch's threads in each started worker; by default the cores are divided among all workers, unless
            OMP_NUM_THREADS says otherwise.
        env: environment variables for the started workers, beside those of this process.
        show_output: whether what the workers print is shown.
        restart: whether a worker that is killed or crashes is started again, under its name. What it held is lost
            unless it was durable (see `telegrad.durable`).
        seed: makes the random numbers of all workers repeatable, this process included; each gets its own, by its rank.
        dashboard: whether to serve a live page of the job; its address is printed, and is `cluster.dashboard`.
        shutdown_timeout: seconds that calls under way at the end of the block may still take, before ShutdownError.

    Examples:
        >>> with telegrad.local_cluster(workers=2):
        ...     rpc.rpc_sync("worker1", pow, (2, 3))
        8
    """
    names = tuple(f"worker{rank}" for rank in range(workers)) if names is None else tuple(names)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a cluster needs at least one worker, and a name of its own for each; got {names}")
    if current_agent() is not None:
        raise AlreadyInitialized("this process is already a worker: call rpc.shutdown() before local_cluster()")
    environment = {**os.environ, **(env or {})}
    environment |= variables_for(len(names), environment, threads)
    if seed is not None:
        environment[seeds.VARIABLE] = str(seed)
        seeds.seed_all(seed, rank=0)
    environment["TELEGRAD_BOOT_PATH"] = json.dumps([p or os.getcwd() for p in sys.path])
    cluster = Cluster(names, show_output, environment)
    options = rpc.RpcBackendOptions() if options is None else copy.copy(options)
    options.init_method = Path(cluster.directory, "meeting").as_uri()
    options.secret = secrets.token_hex(32)
    first_at_exit.append(cluster.end_with_program)
    try:
        cluster.start(options)
        rpc.init_rpc(names[0], rank=0, world_size=len(names), rpc_backend_options=options)
        if restart:
            cluster.start_restarting()
        if dashboard:
            cluster.open_page()
        yield cluster
        cluster.shut_down(shutdown_timeout)
    finally:
        if not cluster.is_over:  # else the program has ended, and little is left of its modules
            with contextlib.suppress(ValueError):  # the program ends, and calls it right now
                first_at_exit.remove(cluster.end_with_program)
            cluster.end()
