"""Ray's actor calls under the names the call cases use, for those who have Ray installed.

Ray has no distributed autograd and its references are not torch futures, so only the cases that call and wait run on
it; the others are reported as not available.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_actors: dict[str, Any] = {}


def init_rpc(name: str, rank: int, world_size: int) -> None:
    """Worker 0 starts Ray and one actor for each other worker; the other processes of the set stay idle."""
    if rank:
        return
    ray = import_module("ray")
    ray.init(num_cpus=world_size, include_dashboard=False, log_to_driver=False)

    class Callee:
        def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            return function(*args)

    actor = ray.remote(Callee)
    for other in range(1, world_size):
        _actors[f"worker{other}"] = actor.remote()


def rpc_sync(to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
    return import_module("ray").get(_actors[to].call.remote(function, args))


def shutdown() -> None:
    ray = import_module("ray")
    if ray.is_initialized():
        _actors.clear()
        ray.shutdown()
