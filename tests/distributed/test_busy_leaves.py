"""Leaves that another thread works on are waited for until the pass, or the step, is given up: not for good."""

import re
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.engine.local import claims
from telegrad.errors import RpcTimeout, WorkerDied
from telegrad.optim import DistributedOptimizer
from telegrad.rpc.current import require_agent
from telegrad.rpc.threads import interrupts
from tests.cluster import Cluster, cluster
from tests.oracle.interpreter import await_empty
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PATIENCE = 0.5


@pytest.fixture
def workers() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made
        await_empty(2)


class Holder:
    """A thread that has some leaves until it is told to let go, as one has whose hook waits for somebody."""

    def __init__(self, *leaves: Tensor) -> None:
        self._has, self._let_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=leaves, name="busy")
        self._thread.start()
        assert self._has.wait(30)

    def _hold(self, *leaves: Tensor) -> None:
        claim = claims.try_claim(leaves)
        assert claim is not None
        self._has.set()
        assert self._let_go.wait(120)
        claims.release(claim)

    def end(self) -> None:
        self._let_go.set()
        self._thread.join()


parameter = torch.nn.Parameter(torch.ones(2))
holders: list[Holder] = []


def parameter_here() -> Tensor:
    return parameter


def times_parameter(x: Tensor) -> Tensor:
    return x * parameter


def begin_holding() -> None:
    holders.append(Holder(parameter))


def end_holding() -> list[float]:
    """The parameter, once it is free again."""
    holders.pop().end()
    assert not claims._holders
    found: list[float] = parameter.tolist()
    return found


def nobody_waits() -> bool:
    return not claims._waiting


def test_a_root_whose_leaves_are_busy_keeps_its_deadline(workers: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    holder = Holder(x)
    try:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, (x * 2, 3.0)).sum() + (x * x).sum()
            with pytest.raises(RpcTimeout, match=re.escape("this worker waits for leaves that thread 'busy' works on")):
                autograd.backward(context_id, [loss], timeout=PATIENCE)
    finally:
        holder.end()
    with autograd.context() as context_id:
        autograd.backward(context_id, [(rpc.rpc_sync("worker1", torch.mul, (x * 2, 3.0))).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0, 6.0]


def test_a_root_whose_leaves_are_busy_is_interrupted(workers: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_MOST_SECONDS", 1000.0)  # it is raised in the wait, or not at all
    x = torch.ones(2, requires_grad=True)
    holder = Holder(x)

    def interrupt() -> None:
        wait_until(lambda: not nobody_waits(), 30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, (x * 2, 3.0)).sum()
            with pytest.raises(KeyboardInterrupt):
                autograd.backward(context_id, [loss], timeout=10)
        assert nobody_waits()
    finally:
        thread.join(60)
        holder.end()


def test_a_participant_whose_leaves_are_busy_stops_waiting_when_the_pass_is_given_up(workers: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    rpc.rpc_sync("worker1", begin_holding)
    try:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", times_parameter, (x,)).sum()
            with pytest.raises(RpcTimeout, match="worker1"):
                autograd.backward(context_id, [loss], timeout=PATIENCE)
        wait_until(lambda: rpc.rpc_sync("worker1", nobody_waits), 30)  # though the leaf is as busy as before
    finally:
        rpc.rpc_sync("worker1", end_holding)


def test_a_step_whose_trainer_has_gone_changes_nothing(workers: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = rpc.remote("worker1", parameter_here)
    optimizer = DistributedOptimizer(torch.optim.SGD, [reference], lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [reference.to_here().sum()])
        rpc.rpc_sync("worker1", begin_holding)
        monkeypatch.setattr(require_agent(), "rpc_timeout", PATIENCE)
        with pytest.raises(RpcTimeout, match="worker1"):
            optimizer.step(context_id)
        monkeypatch.undo()
        wait_until(lambda: rpc.rpc_sync("worker1", nobody_waits), 30)
        assert rpc.rpc_sync("worker1", end_holding) == [1.0, 1.0]
        optimizer.step(context_id)
        assert reference.to_here().tolist() == [0.5, 0.5]


def train_once() -> None:
    reference = rpc.remote("worker1", parameter_here)
    optimizer = DistributedOptimizer(torch.optim.SGD, [reference], lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [reference.to_here().sum()])
        rpc.rpc_sync("worker1", begin_holding)
        optimizer.step(context_id)


def test_a_step_whose_trainer_has_died_changes_nothing() -> None:
    with cluster(3) as job:
        lost = rpc.rpc_async("worker2", train_once)
        wait_until(lambda: not rpc.rpc_sync("worker1", nobody_waits), 30)
        job.kill("worker2")
        with pytest.raises(WorkerDied, match="worker2"):
            lost.wait()
        wait_until(lambda: rpc.rpc_sync("worker1", nobody_waits), 30)
        assert rpc.rpc_sync("worker1", end_holding) == [1.0, 1.0]
