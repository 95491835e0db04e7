"""A worker whose threads are all taken: those who ask hear so at their deadlines, and all goes on when one is free."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import RpcTimeout, WorkerDied
from telegrad.rpc.current import require_agent
from telegrad.rpc.threads import io_threads
from tests.cluster import Cluster, cluster
from tests.waiting import wait_until

CAP = 6

_gate = threading.Event()


@pytest.fixture
def capped() -> Iterator[Cluster]:
    """Three workers, of which worker1 may have no more than a few threads."""
    with cluster(3, heartbeat=0.4, num_worker_threads=2) as made:
        rpc.rpc_sync("worker1", lower_cap)
        yield made


def lower_cap() -> None:
    io_threads._MOST_THREADS = CAP
    _gate.clear()


def wait_for_gate() -> str:
    assert _gate.wait(150)
    return "done"


def open_gate_when(path: str) -> None:
    """Not by a call, for which no thread is left."""

    def look() -> None:
        while not Path(path).exists():
            time.sleep(0.01)
        _gate.set()

    threading.Thread(target=look, daemon=True).start()


def descend(left: int, timeout: float) -> int:
    """Calls back and forth between worker1 and worker2; each level keeps a thread on both."""
    there = "worker2" if rpc.get_worker_info().name == "worker1" else "worker1"
    return 1 + rpc.rpc_sync(there, descend, args=(left - 1, timeout), timeout=timeout) if left else 0


@pytest.mark.slow
def test_callers_hear_of_it_and_all_goes_on(capped: Cluster, tmp_path: Any) -> None:
    rpc.rpc_sync("worker1", open_gate_when, args=(str(tmp_path / "open"),))
    held = [rpc.rpc_async("worker1", wait_for_gate, timeout=150) for _ in range(CAP + 4)]
    wait_until(lambda: require_agent().links["worker1"].exhausted[1] == CAP)
    for timeout in (2.0, 8.0, 32.0):  # in which the worker says so again
        with pytest.raises(RpcTimeout) as caught:
            rpc.rpc_sync("worker1", answer, timeout=timeout)
        if "threads" in str(caught.value):
            break
    assert f"all its {CAP} threads are taken" in str(caught.value)
    (tmp_path / "open").touch()
    assert [each.wait() for each in held] == ["done"] * len(held)
    assert rpc.rpc_sync("worker1", answer) == "here"


@pytest.mark.slow
def test_calls_in_a_circle_end_at_their_deadlines(capped: Cluster) -> None:
    assert rpc.rpc_sync("worker1", descend, args=(4, 60.0)) == 4
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker1", descend, args=(4 * CAP, 3.0))
    deadline = time.monotonic() + 60
    while True:
        try:
            assert rpc.rpc_sync("worker1", answer, timeout=5.0) == "here"
            break
        except RpcTimeout:
            assert time.monotonic() < deadline, "the threads do not come free"


@pytest.mark.slow
def test_a_death_is_noticed_all_the_same(capped: Cluster) -> None:
    """Every thread of worker1 waits for worker2, without a deadline; its end ends them all."""
    held = [rpc.rpc_async("worker1", ask_for_gate, timeout=150) for _ in range(CAP + 4)]
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker1", answer, timeout=1.0)
    capped.kill("worker2")
    for each in held:
        with pytest.raises(WorkerDied, match="worker2"):
            each.wait()
    assert rpc.rpc_sync("worker1", answer) == "here"


def ask_for_gate() -> str:
    return rpc.rpc_sync("worker2", wait_for_gate, timeout=0)


def answer() -> str:
    return "here"
