"""Monarch's actor calls under the names the call cases use, for those who have it installed (`torchmonarch`).

Monarch has no distributed autograd over its actors and its futures are not torch's, so only the cases that call and
wait run on it; the others are reported as not available.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_actors: dict[str, Any] = {}


def init_rpc(name: str, rank: int, world_size: int) -> None:
    """Worker 0 starts one process with an actor for each other worker; the other processes of the set stay idle."""
    if rank:
        return
    monarch = import_module("monarch.actor")
    from benchmarks.monarch_callee import Callee

    host = monarch.this_host()
    for other in range(1, world_size):
        processes = host.spawn_procs(per_host={"procs": 1})
        _actors[f"worker{other}"] = processes.spawn("callee", Callee)
    for actor in _actors.values():
        actor.call.call_one(int, ()).get()


def rpc_sync(to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
    return _actors[to].call.call_one(function, args).get()


def shutdown() -> None:
    if _actors:
        _actors.clear()
        import_module("monarch.actor").shutdown_context().get()
