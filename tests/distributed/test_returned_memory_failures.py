"""Memory on its way back when something goes wrong: nothing is lost, nothing is used twice, all of it is freed."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from telegrad.errors import RpcTimeout, WorkerDied
from telegrad.rpc.current import require_agent
from telegrad.transport.blocks.lending import Lender
from tests.chaos.test_cuts import arm, disarm
from tests.cluster import WAYS, Cluster, cluster
from tests.distributed.test_memory import assert_flat, both_resident
from tests.waiting import wait_until

MB = 2**20
FLOATS = MB // 4


@pytest.fixture
def shared() -> Iterator[Cluster]:
    with cluster(2, heartbeat=1.0, **WAYS["unix-shm"]) as made:
        yield made


# --- what runs on the worker ---

go_on = threading.Event()
begun = threading.Event()


def add_one(x: Tensor) -> Tensor:
    return x.add_(1)


def add_one_when_told(x: Tensor) -> Tensor:
    begun.set()
    assert go_on.wait(90)
    return x.add_(1)


def has_begun() -> bool:
    return begun.is_set()


def tell() -> None:
    go_on.set()


def nothing() -> None:
    """What the worker has released comes with a message."""


def again() -> None:
    go_on.clear()
    begun.clear()


# --- how it is looked at ---


def lender() -> Lender:
    agent = require_agent()
    found = agent.link(agent.find("worker1")).connection().memory.lender
    assert found is not None
    return found


def nothing_is_lent() -> bool:
    rpc.rpc_sync("worker1", nothing)
    return lender().lent_bytes == 0


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["cut before", "cut in half", "cut after"])
def test_cuts_while_it_is_under_way(shared: Cluster, kind: str) -> None:
    """The reply is asked for again, over a connection that knows nothing of the block it lay in."""
    results = []
    for name in shared.names:
        for at in range(1, 8):
            rpc.rpc_sync(name, arm, (kind, at), timeout=60)
            sent = [10.0 * at + i for i in range(3)]
            futures = [rpc.rpc_async("worker1", add_one, (torch.full((FLOATS,), x),), timeout=60) for x in sent]
            results += [(x + 1, future.wait()) for x, future in zip(sent, futures, strict=True)]
            rpc.rpc_sync(name, disarm, timeout=60)
    for expected, result in results:  # kept until now: none was written to by those that came later
        assert result.min() == result.max() == expected
    del results, result, futures
    wait_until(nothing_is_lent)


def test_a_call_that_timed_out_gives_its_memory_back(shared: Cluster) -> None:
    """The reply comes when nobody waits for it."""
    for timeout in (0.1, 1.0, 10.0):  # on a busy machine it may be given up before it has begun
        rpc.rpc_sync("worker1", again)
        late = rpc.rpc_async("worker1", add_one_when_told, (torch.ones(FLOATS),), timeout=timeout)
        with pytest.raises(RpcTimeout):
            late.wait()
        if rpc.rpc_sync("worker1", has_begun):
            break
    assert lender().lent_bytes > 0
    rpc.rpc_sync("worker1", tell)
    wait_until(nothing_is_lent)


def test_a_worker_that_is_killed_leaves_what_it_gave_back(shared: Cluster) -> None:
    result = rpc.rpc_sync("worker1", add_one, (torch.ones(FLOATS),))
    waiting = rpc.rpc_async("worker1", add_one_when_told, (torch.ones(FLOATS),))
    wait_until(lambda: rpc.rpc_sync("worker1", has_begun))
    shared.kill("worker1")
    with pytest.raises(WorkerDied):
        waiting.wait()
    assert result.min() == result.max() == 2
    result.fill_(3)
    assert result.sum() == 3 * FLOATS


def test_memory_stays_flat_over_many_echoes(shared: Cluster) -> None:
    x = torch.ones(4 * FLOATS)

    def calls(count: int) -> Tensor:
        for _ in range(count):
            result = rpc.rpc_sync("worker1", add_one, (x,))
        return result

    kept = calls(10)
    assert_flat(lambda: calls(300), 24 * MB)
    assert calls(1).sum() == 2 * len(x)
    assert kept.sum() == 2 * len(x)
    assert lender().lent_bytes <= 3 * 4 * MB * 1.25


def test_small_results_do_not_keep_what_they_were_asked_with(shared: Cluster) -> None:
    x, small = torch.ones(4 * FLOATS), torch.zeros(10_000)
    before = both_resident()
    results = [rpc.rpc_sync("worker1", second_of, (x, small)) for _ in range(50)]
    assert both_resident() - before < 48 * MB
    assert all(not result.any() for result in results)


def second_of(x: Tensor, y: Tensor) -> Tensor:
    return y
