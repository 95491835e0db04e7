"""Steps leave nothing behind: no context, pass, tensor, node or thread on any worker, and memory stays flat."""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.functions import RecvNode, SendNode
from telegrad.autograd.registry import registry
from telegrad.engine.passes import Pass
from telegrad.engine.service import PassService
from telegrad.rpc.current import require_agent
from tests.cluster import Cluster, cluster

WORKERS = 3
SHORT, LONG = 500, 20_000
SLACK = 6 * 1024 * 1024  # bytes: an allocator's own ups and downs, far below what one leak per step would take
ROUNDS = 3  # in one of which memory must not grow: threads and arenas come once, a leak comes each time


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    with cluster(WORKERS) as made:
        yield made


weight = torch.rand(64, requires_grad=True)


def layer(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * weight).sin(), x + weight


def layers(x: Tensor) -> tuple[Tensor, Tensor]:
    y, unused = rpc.rpc_sync("worker2", layer, (x * weight,))
    return y, unused


def refuse(gradient: Tensor) -> None:
    raise ValueError("refused")


def step(number: int) -> None:
    """A step with a nested call, unused results and a reference; every tenth has two passes, another tenth fails."""
    x = torch.ones(64, requires_grad=True)
    with autograd.context() as context_id:
        y, _ = rpc.rpc_sync("worker1", layers, (x,))
        reference = rpc.remote("worker2", torch.mul, (y, 2.0))
        loss = (y + reference.to_here()).sum()
        if number % 10 == 1:
            autograd.backward(context_id, [loss], retain_graph=True)
        if number % 10 == 2:
            x.register_hook(refuse)
            with pytest.raises(ValueError, match="refused"):
                autograd.backward(context_id, [loss])
        else:
            autograd.backward(context_id, [loss])
            assert x in autograd.get_gradients(context_id)


def held() -> dict[str, Any]:
    """What is on a worker now, of all that a step makes."""
    gc.collect()
    service: PassService = require_agent().layer(PassService)
    asked = [slot.what() for link in require_agent().peers.links() for slot in link.pending.snapshot()]
    kinds = (Tensor, SendNode, RecvNode, Pass)
    alive = dict.fromkeys((kind.__name__ for kind in kinds), 0)
    for thing in gc.get_objects():
        for kind in kinds:
            if type(thing) is kind:
                alive[kind.__name__] += 1
    return {
        **alive,
        "contexts": len(registry()),
        "passes": len(service.passes()),
        "asked": [what for what in asked if not what.startswith(("reaching the barrier", "held()"))],
        "threads": sum(not thread.name.endswith("-io") for thread in threading.enumerate()),
    }


def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # `held` makes a list of all objects there are, which takes megabytes
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_all(function: Any) -> list[Any]:
    return [rpc.rpc_sync(f"worker{rank}", function) for rank in range(WORKERS)]


def run(steps: int, threads: int) -> None:
    if threads == 1:
        for number in range(steps):
            step(number)
    else:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(step, range(steps)):
                pass


def await_rest() -> list[dict[str, Any]]:
    """What all workers hold once the last step has been forgotten everywhere: the same at two looks in a row."""
    deadline = time.monotonic() + 60
    before, now = [], on_all(held)
    while before != now or any(worker["contexts"] or worker["asked"] for worker in now):
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
        before, now = now, on_all(held)
    return now


def grown(steps: int, threads: int, at_rest: list[dict[str, Any]]) -> list[int]:
    """By how many bytes the workers have grown in so many steps, after which they hold what they held before."""
    before = on_all(resident)
    run(steps, threads)
    assert await_rest() == at_rest
    return [after - earlier for earlier, after in zip(before, on_all(resident), strict=True)]


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("threads", [1, 4])
def test_steps_leave_nothing(trio: Cluster, threads: int, long_profile: bool) -> None:
    steps = (LONG if long_profile else SHORT) // (1 if threads == 1 else 4)
    run(max(100, steps // 4), threads)  # pools, caches and the memory of ended contexts fill up
    at_rest = await_rest()
    found = []
    for _ in range(ROUNDS):
        found.append(grown(steps, threads, at_rest))
        if max(found[-1]) < SLACK:
            return
    pytest.fail(f"resident memory of the workers grew by {found} bytes, each time in {steps} steps")


def small_step() -> None:
    x = torch.ones(64, requires_grad=True)
    with autograd.context() as context_id:
        y, _ = rpc.rpc_sync("worker1", layers, (x,))
        z = rpc.rpc_async("worker2", torch.mul, (x, 2.0)).wait()
        autograd.backward(context_id, [(y + z).sum()])


def left_to_collect(steps: int) -> int:
    """Objects of so many steps that only the garbage collector can end."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            small_step()
        return gc.collect()
    finally:
        gc.enable()


def test_a_step_leaves_no_cycles(trio: Cluster) -> None:
    small_step()
    # The least of a few: what other threads leave meanwhile is counted as well.
    assert min(left_to_collect(20) for _ in range(3)) < 20
