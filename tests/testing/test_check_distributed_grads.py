"""`check_distributed_grads` passes right programs and shows where a wrong one differs."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import rpc
from telegrad.nn import RemoteModule
from telegrad.testing import check_distributed_grads, cluster
from telegrad.testing.one_process import OneProcess

workers = cluster(3, scope="module")
slow = pytest.mark.slow


def forward(module: Any, x: Tensor) -> Tensor:
    return module.local_value()(x)


def forward_through(next_worker: str, module: Any, x: Tensor) -> Tensor:
    return rpc.rpc_sync(next_worker, forward, args=(module, torch.tanh(x))) * 2


def two_owners() -> tuple[Tensor, dict[str, Any]]:
    first = rpc.remote("worker1", nn.Linear, args=(4, 3))
    second = rpc.remote("worker2", nn.Linear, args=(3, 2))
    w = torch.randn(2, 4, requires_grad=True)
    hidden = rpc.rpc_sync("worker1", forward, args=(first, w))
    y = rpc.rpc_sync("worker1", forward_through, args=("worker2", second, hidden))
    return y.square().sum(), {"w": w, "first": first, "second": second}


def with_unused_result() -> tuple[Tensor, dict[str, Any]]:
    w, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    rpc.rpc_sync("worker1", torch.mul, args=(unused, 2))
    return rpc.rpc_async("worker2", torch.mul, args=(w, 3)).wait().sum(), {"w": w, "unused": unused}


def with_remote_module() -> tuple[Tensor, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(3, 3), RemoteModule("worker1/cpu", nn.Linear, args=(3, 1)))
    return model(torch.ones(1, 3)).sum(), {"model": model}


def wrong_in_another_process(x: Tensor, caller: int) -> Tensor:
    y = x * 2
    if os.getpid() != caller:
        y.register_hook(lambda grad: grad * torch.tensor([1.0, 5.0]))
    return y


def wrong() -> tuple[Tensor, dict[str, Any]]:
    w = torch.ones(2, requires_grad=True)
    return rpc.rpc_sync("worker1", wrong_in_another_process, args=(w, os.getpid())).sum(), {"w": w}


@slow
@pytest.mark.parametrize("program", [two_owners, with_unused_result, with_remote_module])
def test_right_programs_pass(workers: object, program: Any) -> None:
    gradients = check_distributed_grads(program)
    assert any(gradient is not None for gradient in gradients.values())


@slow
def test_the_first_difference_is_shown_with_its_place(workers: object) -> None:
    with pytest.raises(AssertionError) as caught:
        check_distributed_grads(wrong)
    assert str(caught.value) == (
        "first difference at the gradient of 'w' on worker 'worker0': distributed 10, in one process 2 "
        "at element [1] (1 of 2 differ)"
    )


@slow
def test_names_are_those_of_the_program(workers: object) -> None:
    assert set(check_distributed_grads(two_owners)) == {
        *("w", "first.weight", "first.bias"),
        *("second.weight", "second.bias"),
    }


def test_the_stand_in_leaves_no_trace() -> None:
    before = (rpc.rpc_sync, rpc.remote, rpc.RRef, "RRef" in vars(rpc))
    with OneProcess(["a", "b"], seed=0).instead_of_workers():
        assert rpc.rpc_sync("b", rpc.get_worker_info).name == "b"
        reference = rpc.remote("b", nn.Linear, args=(2, 2))
        assert reference.rpc_sync().forward(torch.ones(2)).requires_grad
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_async("b", divmod, args=(1, 0)).wait()
        with pytest.raises(ValueError, match="the workers are a, b"):
            rpc.rpc_sync("c", abs, args=(1,))
    assert before == (rpc.rpc_sync, rpc.remote, rpc.RRef, "RRef" in vars(rpc))
