"""Jobs so large that nobody reads the records of all, with real processes: three of them, and the limit at one."""

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.job.rendezvous import register
from tests.cluster import end, join, process
from tests.ports import free_port
from tests.waiting import wait_until

LIFE = 170.0
_told = threading.Event()


def join_large(name: str, rank: int, size: int, meeting: str) -> None:
    register._READ_BY_ALL = 1
    join(name, rank, size, meeting, {})


def serve_until_told(name: str, rank: int, size: int, meeting: str) -> None:
    join_large(name, rank, size, meeting)
    _told.wait(LIFE)
    rpc.shutdown(timeout=60)


def leave() -> None:
    _told.set()


def known() -> list[str]:
    return [member.name for member in require_agent().directory.members()]


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor


def scaled_by(name: str, x: Tensor, factor: Tensor) -> Tensor:
    return rpc.rpc_sync(name, scaled, args=(x, factor))


@pytest.fixture(params=["file", "tcp"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(register, "_READ_BY_ALL", 1)
    return {"file": f"file://{tmp_path}/meeting", "tcp": f"tcp://127.0.0.1:{free_port()}"}[request.param]


@pytest.fixture
def started() -> Iterator[list[Any]]:
    processes: list[Any] = []
    try:
        yield processes
    finally:
        if current_agent() is not None:
            rpc.shutdown(graceful=False)
        end(processes, patience=0)


def end_all(others: Iterable[str], started: list[Any]) -> None:
    """All leave, those that were started and this one."""
    for name in others:
        rpc.rpc_sync(name, leave)
    rpc.shutdown(timeout=60)
    for each in started:
        each.join(60)
        assert each.exitcode == 0


def test_a_pass_goes_through_workers_that_do_not_know_its_root(anywhere: str, started: list[Any]) -> None:
    started += [process(serve_until_told, f"worker{rank}", rank, 3, anywhere) for rank in (1, 2)]
    join_large("worker0", 0, 3, anywhere)
    assert known() == ["worker0"]
    x, factor = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scaled_by, args=("worker2", x, factor)).sum()
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
    assert gradients[x].tolist() == [3.0, 3.0] and gradients[factor].tolist() == [1.0, 1.0]
    assert rpc.rpc_sync("worker1", known) == ["worker0", "worker1", "worker2"]
    assert [info.name for info in rpc.get_worker_infos()] == ["worker0", "worker1", "worker2"]
    end_all(("worker1", "worker2"), started)


def test_the_first_rank_is_killed_and_started_again(anywhere: str, started: list[Any]) -> None:
    """The store, with the register in it, may have ended with it."""
    started += [process(serve_until_told, f"worker{rank}", rank, 3, anywhere) for rank in (0, 2)]
    join_large("worker1", 1, 3, anywhere)
    rpc.rpc_sync("worker0", os.getpid)  # as worker2 has not
    started[0].kill()
    started[0].join()
    started[0] = process(serve_until_told, "worker0", 0, 3, anywhere)
    wait_until(lambda: rpc.rpc_sync("worker0", os.getpid, timeout=60, retries=3) == started[0].pid, 60)
    again = {"timeout": 60, "retries": 3}
    assert rpc.rpc_sync("worker2", rpc.rpc_sync, ("worker0", os.getpid), again) == started[0].pid
    for other in ("worker1", "worker2"):
        assert rpc.rpc_sync("worker0", rpc.rpc_sync, (other, os.getpid)) > 0
    end_all(("worker0", "worker2"), started)
