"""Memory stays flat: over many small calls, over large ones, and over failures."""

import gc
import operator
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.current import require_agent
from tests.cluster import Cluster
from tests.waiting import wait_until

MB = 2**20


def resident() -> int:
    """Bytes of memory this process occupies, shared mappings included."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def fail(x: torch.Tensor) -> None:
    raise ValueError("as asked")


def both_resident() -> int:
    return resident() + rpc.rpc_sync("worker1", resident)


def assert_flat(calls: Callable[[], object], limit: int) -> None:
    """Both workers together grow by fewer bytes while calls are made; with `pytest -s` it shows by how many.

    Once in three times is enough: one more thread, and what its allocator keeps, comes once, and a leak each time."""
    found: list[int] = []
    while len(found) < 3 and (not found or found[-1] >= limit):
        before = both_resident()
        calls()
        found.append(both_resident() - before)
    text = f"resident on both workers: more by {[f'{each / MB:.1f} MB' for each in found]}"
    print(f"\n{text}")
    assert found[-1] < limit, text


def replies_kept() -> int:
    """Replies that this worker still remembers."""
    return sum(len(session.requests.replies) for session in require_agent().peers.sessions())


@pytest.mark.slow
def test_small_calls(job: Cluster, long_profile: bool) -> None:
    """100,000 in the long profile."""
    x = torch.ones(2, 2)

    def calls(count: int) -> None:
        for _ in range(count // 2):
            rpc.rpc_sync("worker1", operator.add, (x, x))
        for _ in range(count // 200):
            torch.futures.wait_all([rpc.rpc_async("worker1", operator.add, (x, x)) for _ in range(100)])

    calls(1000)
    files = open_files()
    assert_flat(lambda: calls(100_000 if long_profile else 2000), 8 * MB)
    wait_until(lambda: open_files() <= files)
    wait_until(lambda: rpc.rpc_sync("worker1", replies_kept) < 5)


@pytest.mark.slow
def test_calls_of_16_mb(job: Cluster, long_profile: bool) -> None:
    """2,000 in the long profile."""
    x = torch.ones(4 * MB)

    def calls(count: int) -> None:
        for _ in range(count):
            rpc.rpc_sync("worker1", echo, (x,))

    calls(5)
    files = open_files()
    assert_flat(lambda: calls(2000 if long_profile else 30), 96 * MB)  # a call that keeps what it sent would need 480
    wait_until(lambda: open_files() <= files + 4)


@pytest.mark.slow
def test_calls_of_changing_sizes(job: Cluster, long_profile: bool) -> None:
    def calls(count: int) -> None:
        for i in range(count):
            rpc.rpc_sync("worker1", echo, (torch.empty(10_000 + 37_000 * (i % 20)),))

    calls(40)
    assert_flat(lambda: calls(5000 if long_profile else 100), 64 * MB)


@pytest.mark.slow
def test_failures(job: Cluster, long_profile: bool) -> None:
    x = torch.ones(MB)

    def calls(count: int) -> None:
        for _ in range(count):
            with pytest.raises(ValueError, match="as asked"):
                rpc.rpc_async("worker1", fail, (x,)).wait()

    calls(10)
    assert_flat(lambda: calls(1000 if long_profile else 50), 32 * MB)


def test_large_replies_are_forgotten_once_they_arrived(job: Cluster) -> None:
    rpc.rpc_sync("worker1", echo, (torch.ones(MB),))
    wait_until(lambda: rpc.rpc_sync("worker1", replies_kept) <= 1)
