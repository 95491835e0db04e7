"""The beginning and the end of an agent: `init_rpc` and `shutdown`.

A graceful shutdown ends when all workers have reached it and nothing is under way anywhere: all meet at a barrier with
a count of what they ever asked and served, and when two rounds in a row give the same sum, nothing moved in between.
"""

import atexit
import copy
import enum
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from telegrad.errors import AlreadyInitialized, RendezvousError, ShutdownError
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_agent, require_agent, set_current_agent
from telegrad.rpc.job.barrier import ask_who_is_missing, barrier
from telegrad.rpc.job.ending import WITHOUT_SHUTDOWN, ending_at_exit, ending_by, watch_child
from telegrad.rpc.job.environment import detect
from telegrad.rpc.job.join import end_job, leave, let_go_of_store, start
from telegrad.rpc.job.membership import Membership
from telegrad.rpc.options import DEFAULT_INIT_METHOD, DEFAULT_SHUTDOWN_TIMEOUT, RpcBackendOptions, as_int
from telegrad.rpc.threads import interrupts
from telegrad.rpc.threads.cores import return_share, take_share
from telegrad.rpc.threads.interrupts import pause
from telegrad.rpc.workers import WorkerInfo, check_name

_LOOK_SECONDS = 0.001
_DELIVERY_SECONDS = 5.0
_MOST_LISTED = 10

_lock = threading.Lock()
# What is open around this worker, and is ended before it when the program ends; called with whether that ended well.
first_at_exit: list[Callable[[bool], None]] = []


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> "Joined":
    """Make this process a worker: it can then call the others and be called by them.

    Without arguments it finds name, rank, number of workers and where they meet by itself, under `telegrad run`,
    torchrun, Slurm, Kubernetes and MPI; `telegrad doctor` prints what it finds and why.

    Args:
        name: unique among the workers: letters, digits, `_`, `:` and `-`.
        backend: torch's `BackendType.TENSORPIPE` or None, which mean the same; there is one backend.
        rank: the id of this worker, from 0; in a job of open size it may be left out.
        world_size: how many workers there are; None if they may come and go at any time.
        rpc_backend_options: see `RpcBackendOptions`.

    Returns when all `world_size` workers are there. RendezvousError at the deadline names those that are missing. What
    it returns may be used in a `with` block, whose end is a graceful `shutdown`, or one at once after an error.

    Examples:
        >>> with rpc.init_rpc("worker0", rank=0, world_size=1) as me:
        ...     rpc.rpc_sync(me, pow, (2, 3))
        8
    """
    _check_backend(backend)
    rank, world_size = as_int("rank", rank), None if world_size is None else as_int("world_size", world_size)
    options = RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    if not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    job = ""
    if options.init_method == DEFAULT_INIT_METHOD and world_size is None and rank < 0:
        found = detect(os.environ, socket.getfqdn() if "JOB_COMPLETION_INDEX" in os.environ else "")
        if name is None and not found.name:
            raise RendezvousError(
                "init_rpc() found no engine that started this process (see `telegrad doctor`): give it a name, and "
                "MASTER_ADDR and MASTER_PORT where the workers are to meet, or start it by `telegrad run`"
            )
        options = copy.copy(options)
        options.init_method, options.host = found.address or options.init_method, options.host or found.host or None
        name, rank, world_size, job = name or found.name, found.rank, found.world_size, found.job
    if name is None:
        raise ValueError("a worker that says where it joins has to say its name, too")
    check_name(name)
    if world_size is not None and world_size <= 0:
        raise ValueError(f"world_size must be positive, or None for a job of open size, got {world_size}")
    if world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of worker {name!r} is not within 0..{world_size - 1}")
    return Joined(start_worker(name, rank, world_size, options, job=job))


def _check_backend(backend: Any) -> None:
    """A member of torch's BackendType, or of the one that stands in for it, or its name: there is no other backend."""
    is_member = isinstance(backend, enum.Enum) and type(backend).__name__ == "BackendType"
    if backend is not None and backend != "TENSORPIPE" and not is_member:
        raise TypeError(
            f"Argument backend must be a member of BackendType or None, got {backend!r}. There is one backend: leave "
            "it out, and give the others by name, as in init_rpc('worker0', rank=0, world_size=2)"
        )


class Joined:
    """This worker's part in the job, as a context manager that ends it; see `init_rpc`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __repr__(self) -> str:
        return f"<Joined as {self._agent.info}>"

    def __enter__(self) -> WorkerInfo:
        return self._agent.info

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if current_agent() is not self._agent:
            return  # the block has called `shutdown` itself
        if error is None:
            shutdown()
        else:
            _end_early(self._agent, ending_by(error, tells_text=not self._agent.layers.plain))


def start_worker(
    name: str, rank: int, world_size: int | None, options: RpcBackendOptions, store: Any = None, job: str = ""
) -> Agent:
    """Start the agent of this process; the workers meet in `store`, or where the options say. `job` is what the engine
    that started it calls the job, if there is one."""
    interrupts.install()
    watch_child(_at_exit)
    with _lock:
        if current_agent() is not None:
            raise AlreadyInitialized("RPC is already initialized: call rpc.shutdown() before init_rpc() again")
        agent = start(name, rank, world_size, options, store, job)
    take_share(agent.directory.workers_here(agent.member))
    return agent


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End this worker.

    A graceful shutdown waits until all workers have called it and nothing is under way, up to `timeout` seconds (0:
    without a limit); at the deadline it ends all the same and raises ShutdownError, which says who and what was
    missing. Workers that died are not waited for. With `graceful=False` it ends at once.

    Examples:
        >>> joined = rpc.init_rpc("worker0", rank=0, world_size=1)
        >>> rpc.shutdown()
    """
    agent = require_agent()
    try:
        if graceful:
            wait_for_all(agent, timeout)
    finally:
        with _lock:
            if current_agent() is agent:
                set_current_agent(None)
        leave(agent)
        let_go_of_store(agent)
        agent.close()
        return_share()
        interrupts.uninstall()


def wait_for_all(agent: Agent, timeout: float, leaving: bool = True, prepare: bool = True) -> None:
    """Wait until all workers wait here and nothing is under way. Those `leaving` let go of what they hold first, unless
    `prepare` is False: they have done so already."""
    deadline = time.monotonic() + timeout if timeout else float("inf")
    if agent.world_size is None:
        _drain(agent, deadline, timeout)
        if prepare:
            _prepare(agent)
        _deliver(agent, deadline)
        return
    with agent.layer(Membership).leaving_together():
        _wait_for_all_together(agent, deadline, timeout, leaving, leaving and prepare)
    if leaving:
        _deliver(agent, deadline)


def _prepare(agent: Agent) -> None:
    for layer in agent.layers:
        layer.before_shutdown()


def _wait_for_all_together(agent: Agent, deadline: float, timeout: float, leaving: bool, prepare: bool) -> None:
    previous = -1
    generation = 0
    while True:
        _drain(agent, deadline, timeout)
        activity = agent.runtime.calls_made + agent.runtime.calls_served
        try:
            total = barrier(agent, f"shutdown/{generation}", activity, deadline)
        except TimeoutError as error:
            missing = ask_who_is_missing(agent, f"shutdown/{generation}")
            begun = agent.under_way()  # since this worker had nothing to do: others may wait for it
            here = f". Under way here: {_listed(begun)}" if begun else ""
            raise ShutdownError(
                f"shutdown of worker {agent.info.name!r} gave up after {timeout:g} s: not every worker has called it, "
                f"or is done with its work. Missing: {missing}{here}"
            ) from error
        if generation == 0:
            if prepare:
                _prepare(agent)
        elif total == previous:
            break
        previous = total
        generation += 1
    if leaving:
        # Whoever comes back to this store must find that all have left it, also those slower to leave; and must
        # not find the store of this job where the next one will have its own.
        leave(agent)
        barrier(agent, "shutdown/left", 0, deadline)
        end_job(agent)
        let_go_of_store(agent)
        barrier(agent, "shutdown/closed", 0, deadline)


def _drain(agent: Agent, deadline: float, timeout: float) -> None:
    """Wait until nothing this worker asked or serves is under way. Barriers do not count: they wait for us."""
    while True:
        waiting = agent.under_way()
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise ShutdownError(
                f"shutdown of worker {agent.info.name!r} gave up after {timeout:g} s; still under way: "
                f"{_listed(waiting)}"
            )
        pause(_LOOK_SECONDS)


def _listed(waiting: list[str]) -> str:
    return ", ".join(waiting[:_MOST_LISTED])


def _deliver(agent: Agent, deadline: float) -> None:
    """Give the last answers a moment to reach those who asked, who may be slow to take them in."""
    until = min(deadline, time.monotonic() + _DELIVERY_SECONDS)
    for session in agent.peers.sessions():
        session.deliver(until)


def _at_exit() -> None:
    try:
        while first_at_exit:
            first_at_exit.pop()(ending_at_exit() == WITHOUT_SHUTDOWN)
    finally:
        agent = current_agent()
        if agent is not None:
            _end_early(agent, ending_at_exit(tells_text=not agent.layers.plain))


def _end_early(agent: Agent, ending: str) -> None:
    """This worker's part ends without a shutdown: the others are told so, and how."""
    with _lock:
        if current_agent() is agent:
            set_current_agent(None)
    leave(agent, ending=ending)
    agent.close(ending=ending)
    let_go_of_store(agent, ending=ending)
    return_share()
    interrupts.uninstall()


atexit.register(_at_exit)
