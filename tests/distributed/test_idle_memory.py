"""Shared memory that no tensor uses goes back to the system, on both ends."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.current import require_agent
from tests.cluster import Cluster, cluster
from tests.waiting import wait_until

MB = 2**20


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def blocks() -> int:
    """Blocks of shared memory that are mapped here, from either end."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:telegrad")


def tidy() -> None:
    require_agent().idle_memory.tidy(before=time.monotonic())


def tidy_up() -> None:
    """What the agent does every few seconds, until no block is left."""
    deadline = time.monotonic() + 60
    while blocks() and time.monotonic() < deadline:
        tidy()
        time.sleep(0.005)


def tidy_when_told() -> None:
    """Not by itself, every few seconds, which may be in the middle of a test."""
    require_agent().idle_memory._look = lambda: None  # type: ignore[method-assign] # nor does it go on looking


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(2) as made:
        for name in made.names:
            rpc.rpc_sync(name, tidy_when_told)
        yield made


def tidy_up_aside() -> None:
    threading.Thread(target=tidy_up).start()


def test_idle_memory_is_returned_by_both(pair: Cluster) -> None:
    """Of the tensors of a call, and of those that came back, though nothing more is said between the two."""
    assert torch.equal(rpc.rpc_sync("worker1", echo, (torch.ones(MB),)), torch.ones(MB))
    assert blocks() == rpc.rpc_sync("worker1", blocks) == 1  # it came back in the block it went in
    assert torch.equal(rpc.rpc_sync("worker1", copy, (torch.ones(MB),)), torch.ones(MB))
    assert blocks() == rpc.rpc_sync("worker1", blocks) == 2
    rpc.rpc_sync("worker1", tidy_up_aside)
    tidy_up()
    wait_until(lambda: blocks() == rpc.rpc_sync("worker1", blocks) == 0)


def test_memory_in_use_is_kept(pair: Cluster) -> None:
    came = rpc.rpc_sync("worker1", echo, (torch.ones(MB),))
    for _ in range(3):
        tidy()
        rpc.rpc_sync("worker1", tidy)
    assert blocks() == 1
    assert torch.equal(came, torch.ones(MB))
    assert torch.equal(rpc.rpc_sync("worker1", echo, (came,)), came)
