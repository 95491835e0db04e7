"""Runs with real workers, one of which is killed at a chosen moment: what comes back, what is raised, what is left."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import autograd, durable, rpc
from telegrad.errors import DurableError, NotRestored, RunSuperseded, StateLost, WorkerDied
from telegrad.nn import RemoteModule
from tests.chaos.harm import HarmedCluster, harmed_cluster
from tests.cluster import end, process, serve
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class Counter:
    """A value that is not torch's, with functions for its state."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def add_later(self, number: int) -> Any:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(self.add(number))
        return future


def save(counter: Counter) -> int:
    return counter.count


def load(counter: Counter, count: int) -> None:
    counter.count = count


class Relay(nn.Module):
    """A module on one worker that calls a durable one on another."""

    def __init__(self, following: RemoteModule) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.following = following

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.following(x * self.scale)
        return y


@pytest.fixture
def cluster() -> Iterator[HarmedCluster]:
    with harmed_cluster(3) as made:
        yield made
        for name in made.names:
            made.await_back(name)
            wait_until(lambda name=name: rpc.rpc_sync(name, open_runs) == [])  # it is told without being waited for


def kill(cluster: HarmedCluster, *names: str, restart: bool = True) -> None:
    for name in names:
        cluster.kill(name)
    for name in names if restart else ():
        index = cluster.others.index(name)
        end([cluster.processes[index]], patience=0)
        arguments = (name, index + 1, cluster.size, cluster.meeting, cluster.options)
        cluster.processes[index] = process(serve, *arguments)


def train(run: durable.Run, step: Callable[[int], object], steps: int = 5) -> None:
    for k in run.steps(steps):
        with run.step():
            step(k)


def test_a_reference_outlives_the_incarnation_of_its_owner(cluster: HarmedCluster) -> None:
    with durable.Run("counting", every=1) as run:
        counter = run.remote("worker1", Counter, save=save, load=load)
        ordinary = rpc.remote("worker1", Counter)
        assert not counter.is_owner() and counter.owner_name() == "worker1"
        for k in run.steps(4):
            with run.step():
                counter.rpc_sync().add(10)
                if k == 2 and not run.returns:
                    kill(cluster, "worker1")
                    counter.rpc_sync().add(1)
        assert counter.rpc_async().add(0).wait() == counter.rpc_sync().add_later(0) == 40
        assert counter.to_here().count == 40
        assert counter.remote().add(0).to_here() == 40
        assert rpc.rpc_sync("worker2", call_add, (counter, 5)) == 45
        [back] = run.returns
        assert back.died == ("worker1",) and back.to_step <= 2  # the copies of the last snapshot may not have arrived
        with pytest.raises(WorkerDied, match="worker1"):
            ordinary.rpc_sync().add(1)


def call_add(counter: Any, number: int) -> Any:
    return counter.rpc_sync().add(number)


def test_a_step_that_some_had_applied_is_undone_on_all(cluster: HarmedCluster) -> None:
    """The driver's values, the survivor's and the lost one's move together."""
    with durable.Run("together", every=2) as run:
        counters = [run.remote(name, Counter, save=save, load=load) for name in cluster.names]
        seen: dict[int, list[int]] = {}
        for k in run.steps(5):
            with run.step():
                seen[k] = [counters[0].rpc_sync().add(1), counters[1].rpc_sync().add(1)]
                if k == 3 and not run.returns:
                    kill(cluster, "worker2")
                seen[k].append(counters[2].rpc_sync().add(1))
        assert seen == {k: [k + 1] * 3 for k in range(5)}
        assert run.returns[0].to_step in (0, 2)


def test_modules_may_call_each_other_and_keep_their_mode(cluster: HarmedCluster) -> None:
    with durable.Run("relay", every=1, seed=3, copies=2) as run:
        last = run.module("worker2", nn.Linear, (2, 1))
        first = run.module("worker1", Relay, (last,))
        local = run.keep(nn.Linear(2, 2))
        last.eval()
        optimizer = run.optimizer(
            torch.optim.SGD, [{"params": [first, local], "lr": 0.1}, {"params": last}], lr=0.5, momentum=0.9
        )
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        for k in run.steps(3):
            with run.step() as context_id:
                loss = first(local(torch.ones(1, 2))).sum()
                if k == 1 and not run.returns:
                    kill(cluster, "worker1", "worker2")
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        assert len(run.returns) == 1
        assert not last.get_module_rref().to_here().training
        assert first.get_module_rref().to_here().training


def test_a_loop_may_be_left_and_entered_again(cluster: HarmedCluster) -> None:
    with durable.Run("left") as run:
        counter = run.remote("worker1", Counter, save=save, load=load)
        for k in run.steps(10):
            if k == 4:
                break
            with run.step():
                counter.rpc_sync().add(1)
            if k == 2:
                break
        for k in run.steps(6):
            with run.step():
                assert counter.rpc_sync().add(1) == k + 1
        assert run.completed == 6


def test_other_errors_of_a_step_are_raised_and_it_is_undone(
    cluster: HarmedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    run = durable.Run("failing")
    counter = run.remote("worker1", Counter, save=save, load=load)

    def step(_: int) -> None:
        counter.rpc_sync().add(1)
        rpc.rpc_sync("worker1", divide)

    with pytest.raises(ZeroDivisionError):
        train(run, step)
    assert counter.rpc_sync().add(0) == 1
    with caplog.at_level("WARNING", "telegrad.durable"):
        assert list(run.steps(2)) == [0, 1]
    assert caplog.text.count("step 0 of run 'failing' had no block") == 1 == caplog.text.count("had no block")
    assert counter.rpc_sync().add(0) == 0
    with pytest.raises(DurableError, match="has begun: declare"):
        run.keep(Counter(), save=save, load=load)
    with pytest.raises(DurableError, match="has a run 'failing' already"):
        durable.Run("failing")
    run.close()


def divide() -> float:
    return 1 / 0


def test_a_run_that_lost_a_worker_and_its_copies_ends(cluster: HarmedCluster) -> None:
    run = durable.Run("lost", every=1)
    counter = run.remote("worker1", Counter, save=save, load=load)
    run.remote("worker2", Counter, save=save, load=load)

    def step(k: int) -> None:
        counter.rpc_sync().add(1)
        if k == 3:
            kill(cluster, "worker1", "worker2")

    with pytest.raises(StateLost, match=r"no copy of the state of 'worker1'(, 'worker2')? is left.*Raise `copies`"):
        train(run, step)
    run.close()


def test_unless_it_is_on_disk(cluster: HarmedCluster, tmp_path: Path) -> None:
    with durable.Run("saved", every=1, directory=tmp_path, disk_every=2) as run:
        counter = run.remote("worker1", Counter, save=save, load=load)
        run.remote("worker2", Counter, save=save, load=load)
        for _ in run.steps(10_000):  # until there is something on disk, however slow that is
            with run.step():
                if not run.returns and list(tmp_path.glob("saved/*/whole.json")):
                    kill(cluster, "worker1", "worker2")
                counter.rpc_sync().add(1)
                time.sleep(0.01)
            if run.returns:
                break
        last = run.completed + 3
        for _ in run.steps(last):
            with run.step():
                counter.rpc_sync().add(1)
        assert counter.rpc_sync().add(0) == last
        assert len(run.returns) == 1 and run.returns[0].to_step >= 2
    with durable.Run("saved", directory=tmp_path) as again:  # closed, but not forgotten
        counter = again.remote("worker1", Counter, save=save, load=load)
        again.remote("worker2", Counter, save=save, load=load)
        assert list(again.steps(last + 1)) == [last]
        assert counter.rpc_sync().add(0) == last
    with durable.Run("saved", directory=tmp_path, resume=False) as anew:
        counter = anew.remote("worker1", Counter, save=save, load=load)
        anew.remote("worker2", Counter, save=save, load=load)
        assert list(anew.steps(2)) == [0, 1]


def test_an_optimizer_goes_on_from_disk(cluster: HarmedCluster, tmp_path: Path) -> None:
    def train(last: int, directory: Path) -> tuple[list[int], torch.Tensor]:
        with durable.Run("trained", every=1, seed=3, directory=directory, copies=0) as run:
            layer = run.module("worker1", torch.nn.Linear, (2, 1))
            optimizer = run.optimizer(torch.optim.SGD, [layer], lr=0.5, momentum=0.9)
            steps = []
            for number in run.steps(last):
                with run.step() as context_id:
                    optimizer.param_groups[0]["lr"] = 0.5 / (number + 1)
                    autograd.backward(context_id, [layer(torch.ones(1, 2)).sum()])
                    optimizer.step(context_id)
                steps.append(number)
            return steps, layer(torch.zeros(1, 2)).detach()

    assert train(2, tmp_path / "halves")[0] == [0, 1]
    steps, bias = train(4, tmp_path / "halves")
    assert steps == [2, 3]
    assert torch.equal(bias, train(4, tmp_path / "whole")[1])


def test_a_changed_program_is_told_so(cluster: HarmedCluster, tmp_path: Path) -> None:
    with durable.Run("changed", directory=tmp_path) as run:
        run.remote("worker1", Counter, save=save, load=load)
        list(run.steps(1))
    run = durable.Run("changed", directory=tmp_path)
    run.remote("worker1", Counter, save=save, load=load, name="other")
    with pytest.raises(DurableError, match=r"other values on worker 'worker1'.*\['other'\].*\['Counter@worker1'\]"):
        list(run.steps(2))
    run.close()


def test_a_worker_that_does_not_come_back_is_named(cluster: HarmedCluster) -> None:
    run = durable.Run("waiting", every=1, restart_timeout=0.5)
    counter = run.remote("worker1", Counter, save=save, load=load)

    def step(k: int) -> None:
        if k == 2:
            kill(cluster, "worker1", restart=False)
        counter.rpc_sync().add(1)

    with pytest.raises(WorkerDied, match=r"worker 'worker1' of run 'waiting'.*again within 0.5 s") as raised:
        train(run, step)
    assert raised.value.worker == "worker1"
    run.close()
    cluster.start_again("worker1")


def test_a_call_of_an_abandoned_step_does_no_harm(cluster: HarmedCluster) -> None:
    """It ends before anybody returns; and what it asks of others meanwhile is refused."""
    with durable.Run("late", every=1, seed=1) as run:
        counter = run.remote("worker1", Counter, save=save, load=load)
        run.remote("worker2", Counter, save=save, load=load)
        drawn: dict[int, list[float]] = {}
        for k in run.steps(3):
            with run.step():
                late = rpc.rpc_async("worker1", draw_later, (counter, k == 1 and not run.returns))
                if k == 1 and not run.returns:
                    wait_until(lambda: rpc.rpc_sync("worker1", is_drawing))
                    threading.Thread(target=rpc.rpc_sync, args=("worker1", go_on_when_given_up)).start()
                    kill(cluster, "worker2")
                    rpc.rpc_sync("worker2", abs, (1,))
                drawn[k] = late.wait()
        assert len(run.returns) == 1
        assert rpc.rpc_sync("worker1", outcomes) == ["NotRestored"]
        reference = torch.Generator().manual_seed(rpc.rpc_sync("worker1", initial_seed))
        assert [x for values in drawn.values() for x in values] == torch.rand(6, generator=reference).tolist()


_going = threading.Event()
_drawing = threading.Event()
_outcomes: list[str] = []


def draw_later(counter: durable.DurableRef[Counter], wait: bool) -> list[float]:
    values = torch.rand(1).tolist()
    if wait:
        _drawing.set()
        assert _going.wait(50)
        torch.rand(5)  # after the others have given up
        try:
            counter.local_value()
        except NotRestored as error:
            _outcomes.append(type(error).__name__)
            raise
    return values + torch.rand(1).tolist()


def is_drawing() -> bool:
    return _drawing.is_set()


def go_on_when_given_up() -> None:
    from telegrad.durable.part import part_of
    from telegrad.rpc.current import require_agent

    part = part_of(require_agent(), "late")
    wait_until(lambda: not part.holdings.live)
    _going.set()


def outcomes() -> list[str]:
    return _outcomes


def initial_seed() -> int:
    return torch.initial_seed()


def test_a_driver_that_was_replaced_is_refused(cluster: HarmedCluster) -> None:
    run = durable.Run("taken", every=1)
    counter = run.remote("worker1", Counter, save=save, load=load)

    def step(k: int) -> None:
        counter.rpc_sync().add(1)
        if k == 2:
            rpc.rpc_sync("worker1", raise_epoch)

    with pytest.raises(RunSuperseded, match="two names"):
        train(run, step)
    run.close()


def raise_epoch() -> None:
    from telegrad.durable.part import part_of
    from telegrad.rpc.current import require_agent

    part_of(require_agent(), "taken").holdings.epoch += 1 << 40


def open_runs() -> list[str]:
    from telegrad.durable.part import parts_of
    from telegrad.rpc.current import require_agent

    return list(parts_of(require_agent()).by_run)
