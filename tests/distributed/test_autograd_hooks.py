"""Hooks fire as they do in one process, and a module in DistributedDataParallel reduces as it does in torch."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd, rpc
from tests.cluster import Cluster, cluster
from tests.oracle.interpreter import await_empty

Log = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made
        await_empty(3)


class Watched:
    """A small graph with a hook of every kind on it, and what they saw."""

    def __init__(self) -> None:
        self.log: Log = []
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.layer = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.weight.register_hook(lambda g: self._note("leaf", g))
        self.weight.register_post_accumulate_grad_hook(lambda leaf: self._note("accumulated", leaf.grad))
        self.layer.register_full_backward_hook(lambda _, into, out: self._note("module", [*into, *out]))
        self.accumulator = self.weight.view_as(self.weight).grad_fn.next_functions[0][0]  # hooks on it need it alive
        self.accumulator.register_prehook(lambda gradients: self._note("before the leaf's node", gradients))
        self.accumulator.register_hook(lambda _, gradients: self._note("after the leaf's node", gradients))

    def _note(self, what: str, seen: Any) -> None:
        tensors = [seen] if isinstance(seen, Tensor) else list(seen)
        self.log.append((what, [None if tensor is None else tensor.tolist() for tensor in tensors]))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.weight
        y = self.layer(scaled)
        y.register_hook(lambda g: self._note("tensor", g))
        y.register_hook(lambda g: g * 10)
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda gradients: self._note("before a node", gradients))
        y.grad_fn.register_hook(lambda into, out: self._note("after a node", [*into, *out]))
        torch.autograd.graph.register_multi_grad_hook([scaled, y], lambda gradients: self._note("several", gradients))
        return y * self.weight


_watched: list[Watched] = []


def forward_there(x: Tensor) -> Tensor:
    _watched[:] = [Watched()]
    return _watched[0].forward(x)


def log_there() -> Log:
    return _watched[0].log


@pytest.mark.parametrize("retained", [False, True])
def test_hooks_of_every_kind(trio: Cluster, retained: bool) -> None:
    here = Watched()
    x = torch.tensor([0.5, -1.0], requires_grad=True)
    with autograd.context() as context_id:
        ours = here.forward(rpc.rpc_sync("worker1", forward_there, (here.forward(x),))).sum()
        for _ in range(1 + retained):
            autograd.backward(context_id, [ours], retain_graph=retained)
        there = rpc.rpc_sync("worker1", log_there)
    # One process that runs the same three graphs: two on the first worker's parameters, one on the second's.
    first, second = Watched(), Watched()
    loss = first.forward(second.forward(first.forward(x).clone()).clone()).sum()
    for _ in range(1 + retained):
        loss.backward(retain_graph=retained)
        first.weight.grad = second.weight.grad = None  # a context's gradients are apart from `.grad`
    assert here.log == first.log
    assert there == second.log


# --- DistributedDataParallel ---


class Trainer:
    """A process with a replica of a model, trained together with a layer that lives on another worker."""

    def __init__(self, rank: int, store: str) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
        )
        self.local = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.local.weight.copy_(torch.eye(2))
        self.replica = DistributedDataParallel(self.local)

    def step(self, x: Tensor) -> tuple[Tensor, Any]:
        """The reduced gradient of the replica, and what is in `.grad` then."""
        with autograd.context() as context_id:
            y = self.replica(rpc.rpc_sync("worker2", remote_layer, (self.replica(x),)))
            autograd.backward(context_id, [y.sum()], timeout=60)
            return autograd.get_gradients(context_id)[self.local.weight], self.local.weight.grad


def remote_layer(x: Tensor) -> Tensor:
    return x * torch.tensor([3.0, 5.0])


def train(rank: int, store: str, x: Tensor, steps: int) -> list[tuple[Tensor, Any]]:
    try:
        return _steps(Trainer(rank, store), x, steps)
    finally:
        # After the replica has ended. If that were the last to hold the group, torch would end the group with the GIL
        # held, and wait for a thread of it that may need the GIL to let go of the last tensor.
        dist.destroy_process_group()


def _steps(trainer: Trainer, x: Tensor, steps: int) -> list[tuple[Tensor, Any]]:
    return [trainer.step(x) for _ in range(steps)]


def gradient_in_one_process(x: Tensor) -> Tensor:
    weight = torch.eye(2, requires_grad=True)
    nn.functional.linear(remote_layer(nn.functional.linear(x, weight)), weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


def twice(x: Tensor) -> Tensor:
    return x * 2


def ask_in_turn(x: Tensor, others: tuple[str, ...]) -> Tensor:
    """Call the others, and during the backward pass, when the gradient has come from them, call them again."""
    x.register_hook(lambda g: sum((rpc.rpc_sync(other, twice, args=(g,)) for other in others), torch.zeros_like(g)))
    return sum((rpc.rpc_sync(other, twice, args=(x,)) for other in others), torch.zeros_like(x))


@pytest.mark.parametrize("size", [2, 100_000])
@pytest.mark.parametrize("others", [("worker1",), ("worker1", "worker2"), ("worker1", "worker1")])
def test_a_hook_may_call_the_worker_that_the_gradient_came_from(
    trio: Cluster, size: int, others: tuple[str, ...]
) -> None:
    """The thread that reads the answers runs no hook: it would wait for a reply that nobody reads."""
    x = torch.ones(size, requires_grad=True)
    with autograd.context() as context_id:
        y = ask_in_turn(x, others)
        autograd.backward(context_id, [y.sum()], timeout=60)
        expected = (2.0 * len(others)) ** 2
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((size,), expected))
    leaf = torch.ones(size, requires_grad=True)
    with autograd.context() as context_id:
        z = rpc.rpc_sync("worker2", ask_in_turn, args=(leaf, ("worker1", "worker0")))
        autograd.backward(context_id, [z.sum()], timeout=60)
        assert torch.equal(autograd.get_gradients(context_id)[leaf], torch.full((size,), 16.0))


@pytest.mark.slow
def test_data_parallel_replicas_reduce(trio: Cluster, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    inputs = [torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]])]
    other = rpc.rpc_async("worker1", train, (1, store, inputs[1], 3), timeout=150)
    mine = train(0, store, inputs[0], 3)
    expected = sum(gradient_in_one_process(x) for x in inputs) / 2
    for gradient, grad in [*mine, *other.wait()]:
        torch.testing.assert_close(gradient, expected)
        assert grad is None
