"""Clusters whose large tensors go over several TCP connections, from the first one to the end of a worker."""

import os
import random
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.errors import WorkerDied
from tests.cluster import cluster
from tests.distributed.test_stripes import SECRET, SIZE, STREAMS, link_to, widen
from tests.waiting import wait_until


def _call_until_it_fails(x: torch.Tensor) -> None:
    for _ in range(1000):
        rpc.rpc_sync("worker1", torch.neg, args=(x,), timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_worker_that_is_killed_while_it_receives_is_missed(seed: int) -> None:
    with cluster(2, heartbeat=0.4, transports=("tcp",), secret=SECRET, tcp_connections=STREAMS) as job:
        widen("worker1")
        threading.Timer(random.Random(seed).uniform(0, 0.05), job.kill, args=("worker1",)).start()
        x = torch.ones(16 * SIZE)
        began = time.monotonic()
        with pytest.raises(WorkerDied):
            _call_until_it_fails(x)
        assert time.monotonic() - began < 60


@pytest.mark.slow
def test_streams_and_threads_end_with_the_worker() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with cluster(2, transports=("tcp",), secret=SECRET, tcp_connections=STREAMS):
        sides = widen("worker1")
        assert any("-part" in thread.name for thread in threading.enumerate())
    assert all(side._socket.fileno() < 0 for side in sides)
    wait_until(lambda: not any("-part" in thread.name for thread in threading.enumerate()))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


@pytest.mark.slow
def test_one_connection_where_one_is_asked_for() -> None:
    """The smaller number of both ends counts."""
    with cluster(2, transports=("tcp",), secret=SECRET, tcp_connections=1):
        x = torch.ones(SIZE)
        for _ in range(5):
            assert torch.equal(rpc.rpc_sync("worker1", torch.neg, args=(x,)), -x)
        current = link_to("worker1").current
        assert current is not None and current.stripes is None


@pytest.mark.parametrize("wrong", [0, 17, -1])
def test_the_option_is_checked(wrong: int) -> None:
    with pytest.raises(ValueError, match="tcp_connections must be within"):
        rpc.RpcBackendOptions(tcp_connections=wrong)
