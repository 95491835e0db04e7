"""A loop of calls whose results are added to what was sent: its backward waits inside one engine call, on real workers.

How long it waits depends on the size of the graph; here it waits for as long as it takes.
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.engine.local.local_pass import LocalPass
from telegrad.engine.local.stages import StagedCut
from telegrad.errors import WorkerDied
from tests.cluster import cluster

STEPS = 6
Function = Callable[[Tensor], Tensor]


class _Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        os._exit(1)


def half_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x) * 0.5


def dies_in_backward(x: Tensor) -> Tensor:
    y: Tensor = _Dies.apply(x)
    return y


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stages that an engine call of this process went on to, as they begin."""
    monkeypatch.setattr(LocalPass, "stages_from", 0)
    monkeypatch.setattr(LocalPass, "patience", 60.0)
    numbers: list[int] = []
    fill = StagedCut._fill

    def noted(self: StagedCut, number: int) -> bool:
        numbers.append(number)
        return fill(self, number)

    monkeypatch.setattr(StagedCut, "_fill", noted)
    return numbers


def loop(h: Tensor, worker: str | None, *, unused: int | None = None, second: Function = half_tanh) -> Tensor:
    for step in range(STEPS):
        function = second if step == 1 else half_tanh
        result = function(h) if worker is None else rpc.rpc_sync(worker, function, (h,))
        h = h * 1.5 if step == unused else h + result
    return h


@pytest.mark.slow
def test_equals_one_process_and_ends_with_a_worker_that_dies(followed: list[int]) -> None:
    with cluster(2) as made:
        x = torch.tensor([0.3, -0.4], requires_grad=True)
        for unused in (None, 3):
            with autograd.context() as context_id:
                autograd.backward(context_id, [loop(x.exp(), "worker1", unused=unused).sum()])
                found = autograd.get_gradients(context_id)[x]
            (expected,) = torch.autograd.grad(loop(x.exp(), None, unused=unused).sum(), [x])
            assert torch.allclose(found, expected)
            assert followed
            followed.clear()
        with autograd.context() as context_id:
            root = loop(x.exp(), "worker1", second=dies_in_backward).sum()
            with pytest.raises(WorkerDied, match="worker1"):
                autograd.backward(context_id, [root])
        assert followed
        made.kill("worker1")  # it is dead; now the process is gone, too
