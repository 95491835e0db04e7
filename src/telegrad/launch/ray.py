"""Workers as Ray actors: Ray places them, restarts them and shows their output; they call each other through Telegrad.

    with ray_cluster(workers=4, resources={"CPU": 1}, max_restarts=2) as cluster:
        y = rpc.rpc_sync("worker1", torch.mm, args=(x, w))

This process joins as `driver`, the actors as worker0, worker1 and so on. An actor that is killed is started again by
Ray and joins again under its name; what waits for the dead one ends with WorkerDied, and so does what refers to its
values.

An existing Ray program joins with one call inside its own actors: `telegrad.launch.ray.join("trainer0")`.
"""

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from telegrad import rpc
from telegrad.errors import AlreadyInitialized, RendezvousError, TelegradError
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.job.lifecycle import start_worker

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    from telegrad.launch.ray_store import RayStore, Rendezvous
except ImportError as error:
    raise ImportError("telegrad.launch.ray needs Ray: pip install 'telegrad[ray]'") from error

__all__ = ["RayCluster", "join", "ray_cluster"]

log = logging.getLogger("telegrad.launch")

DRIVER = "driver"
_NAMESPACE = "telegrad"
_LEAVE_SECONDS = 10.0


class Worker:
    """What an actor of a cluster is: a worker that serves calls from the moment it is made, and after each restart."""

    def __init__(self, name: str, rank: int, size: int, rendezvous: Any, options: bytes) -> None:
        _start(name, rank, size, rendezvous, cloudpickle.loads(options))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function here by Ray's own call: `cluster.actors["worker1"].run.remote(f)`."""
        return function(*args, **kwargs)

    def leave(self, timeout: float) -> None:
        """Shut down together with all others."""
        if current_agent() is not None:
            rpc.shutdown(timeout=timeout)


def _start(name: str, rank: int, size: int | None, rendezvous: Any, options: rpc.RpcBackendOptions) -> None:
    options = copy.copy(options)
    options.host = options.host or ray.util.get_node_ip_address()
    job = f"ray {ray.get_runtime_context().get_job_id()}"
    start_worker(name, rank, size, options, RayStore(rendezvous), job=job)


class RayCluster:
    """The actors of a cluster, from the side of the driver."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self.actors = dict(actors)  # handles: `.run.remote(function, ...)`, `ray.kill(handle)`
        self.names = tuple(self.actors)

    def __repr__(self) -> str:
        return f"<RayCluster of {', '.join(self.names)}>"

    def kill(self, name: str) -> None:
        """Kill an actor as a crash would, and wait until it is gone; Ray starts it again as often as `max_restarts`
        allows."""
        agent = require_agent()
        member = agent.find(name)
        agent.link(member).connection()  # over which its end shows
        ray.kill(self.actors[name], no_restart=False)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not agent.is_dead(member) and time.monotonic() < deadline:
            time.sleep(0.01)
            with contextlib.suppress(TelegradError, TimeoutError):
                rpc.rpc_sync(name, _nothing, timeout=1.0)

    def wait_for(self, name: str, seconds: float = 30.0) -> None:
        """Wait until a worker answers, after a restart. RendezvousError at the deadline."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                rpc.rpc_sync(name, _nothing, timeout=max(0.1, deadline - time.monotonic()))
                return
            except (TelegradError, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise RendezvousError(
                        f"{name!r} was not back within {seconds:g} s: {error}. See the actor's state in Ray: has it "
                        "used up its max_restarts?"
                    ) from error
                time.sleep(0.05)

    def leave(self, seconds: float) -> None:
        """Shut all workers down together; those that Ray does not restart any more are not waited for."""
        leaving = [actor.leave.remote(seconds) for actor in self.actors.values()]
        rpc.shutdown(timeout=seconds)
        ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)


def _nothing() -> None:
    """Answers."""


@contextlib.contextmanager
def ray_cluster(
    workers: int = 4,
    *,
    resources: Mapping[str, float] | None = None,
    max_restarts: int = 2,
    placement: str = "SPREAD",
    runtime_env: Mapping[str, Any] | None = None,
    address: str | None = None,
    options: rpc.RpcBackendOptions | None = None,
    placement_timeout: float = 60.0,
    shutdown_timeout: float = 30.0,
) -> Iterator[RayCluster]:
    """Make this process the worker `driver` of a job with `workers` Ray actors, for the length of a block.

    Args:
        workers: how many actors; they are worker0, worker1 and so on.
        resources: what each needs, as Ray counts it: {"CPU": 1, "GPU": 1, "big_disk": 1}. One CPU by default.
        max_restarts: how often Ray starts each again after it died; -1 for always.
        placement: how the placement group spreads them: "SPREAD", "PACK", "STRICT_SPREAD" or "STRICT_PACK".
        runtime_env: of the actors; see Ray's own documentation.
        address: of a running Ray ("auto", "host:6379"); by default the one this process is connected to, or one that is
            started here and ends with the block.
        options: for all workers; the secret and the rendezvous are set here.
        placement_timeout: seconds to wait for the resources.
        shutdown_timeout: seconds that calls under way at the end of the block may still take, before ShutdownError.

    Examples:
        ```python
        with ray_cluster(workers=4, resources={"CPU": 1}) as cluster:
            y = rpc.rpc_sync("worker1", torch.mm, args=(x, w))
        ```
    """
    if workers < 1:
        raise ValueError(f"a cluster needs at least one worker, got {workers}")
    if current_agent() is not None:
        raise AlreadyInitialized("this process is already a worker: call rpc.shutdown() before ray_cluster()")
    wanted = {kind: amount for kind, amount in (resources or {"CPU": 1}).items() if amount}
    owned = not ray.is_initialized()
    if owned:
        ray.init(address=address, logging_level=logging.WARNING)
    group = None
    actors: dict[str, Any] = {}
    rendezvous = None
    try:
        if ray.util.client.ray.is_connected():
            raise RendezvousError(
                "ray:// connects from outside, where workers cannot call back: run the driver in the cluster"
            )
        group = _place(workers, wanted, placement, placement_timeout)
        # On the driver's own node: it goes only where the driver goes as well.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        rendezvous = ray.remote(Rendezvous).options(num_cpus=0, scheduling_strategy=here).remote()
        options = rpc.RpcBackendOptions() if options is None else copy.copy(options)
        options.secret = ray.get(rendezvous.secret.remote())
        for rank in range(workers):
            name = f"worker{rank}"
            actors[name] = (
                ray.remote(Worker)
                .options(
                    max_restarts=max_restarts,
                    num_cpus=wanted.get("CPU", 0),
                    num_gpus=wanted.get("GPU", 0),
                    resources={kind: amount for kind, amount in wanted.items() if kind not in ("CPU", "GPU")},
                    runtime_env=dict(runtime_env or {}),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
                )
                .remote(name, rank, workers + 1, rendezvous, cloudpickle.dumps(options))
            )
        _start(DRIVER, workers, workers + 1, rendezvous, options)
        cluster = RayCluster(actors)
        yield cluster
        if current_agent() is not None:  # the block may have called rpc.shutdown() itself
            cluster.leave(shutdown_timeout)
    finally:
        if current_agent() is not None:
            rpc.shutdown(graceful=False)
        for actor in (*actors.values(), *([rendezvous] if rendezvous is not None else [])):
            ray.kill(actor)
        if group is not None:
            remove_placement_group(group)
        if owned:
            ray.shutdown()


def _place(workers: int, wanted: Mapping[str, float], placement: str, seconds: float) -> Any:
    group = placement_group([dict(wanted) or {"CPU": 0.001}] * workers, strategy=placement)
    if not group.wait(seconds):
        remove_placement_group(group)
        raise RendezvousError(
            f"Ray found no room for {workers} workers with {dict(wanted)} each ({placement}) in {seconds:g} s; it has "
            f"{ray.available_resources()}. Ask for less, or add nodes"
        )
    return group


def join(
    name: str,
    *,
    rank: int = -1,
    world_size: int | None = None,
    job: str = "default",
    options: rpc.RpcBackendOptions | None = None,
) -> None:
    """Make this Ray actor, task or driver a worker; all of this Ray job that call it with the same `job` meet.

    Without `world_size` they may come and go at any time; with it, and a rank for each, `join` returns when all are
    there. Ends with `rpc.shutdown()`. The first creates an actor where they meet.

    Examples:
        ```python
        class Trainer:  # an actor of your own
            def train(self, number):
                telegrad.launch.ray.join(f"trainer{number}")
                ...
                rpc.shutdown()
        ```
    """
    if not ray.is_initialized():
        raise RendezvousError("join() is for programs that run on Ray: call ray.init() first, or join inside an actor")
    context = ray.get_runtime_context()
    in_actor = context.get_actor_id() is not None
    rendezvous = (
        ray.remote(Rendezvous)
        .options(
            name=f"rendezvous {job} of {context.get_job_id()}",
            namespace=_NAMESPACE,
            get_if_exists=True,
            # One that an actor makes would end with that actor; it ends with all of them instead.
            lifetime="detached" if in_actor else None,
            num_cpus=0,
        )
        .remote(ends_with_guests=in_actor)
    )
    options = rpc.RpcBackendOptions() if options is None else copy.copy(options)
    options.secret = ray.get(rendezvous.secret.remote(context.current_actor if in_actor else None))
    _start(name, rank, world_size, rendezvous, options)
