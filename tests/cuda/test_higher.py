"""Gradients of gradients with tensors on the GPU: through calls, by `grad` and by `backward(create_graph=True)`."""

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from tests.cluster import Cluster
from tests.cuda.helpers import LONG, warm


def cubed(x: Tensor) -> Tensor:
    return x**3


def cubed_slowly(x: Tensor) -> Tensor:
    torch.cuda._sleep(LONG // 10)
    return x**3


@pytest.mark.parametrize("function", [cubed, cubed_slowly])
@pytest.mark.parametrize("size", [3, 2**18], ids=["small", "large"])
def test_the_second_derivative_through_a_call(pair: Cluster, function: object, size: int) -> None:
    warm()
    x = torch.full((size,), 2.0, device="cuda", requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", function, args=(x,))
        (first,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True)
        assert first.device == x.device and first.unique().tolist() == [12.0]
        (second,) = autograd.grad(context_id, [first.sum()], [x])
        assert second.device == x.device and second.unique().tolist() == [12.0]


def test_a_penalty_on_the_gradient(pair: Cluster) -> None:
    """Over two workers, from host to GPU and back, against one process."""
    warm()

    def loss(call: object, x: Tensor, w: Tensor) -> Tensor:
        return (call(x.cuda() * w).tanh() * w).sum()  # type: ignore[operator]

    def penalized(gradient: Tensor, value: Tensor) -> Tensor:
        return value.to(gradient.device) + gradient.square().sum()

    x, w = torch.rand(4, requires_grad=True), torch.rand(4, device="cuda", requires_grad=True)
    with autograd.context() as context_id:
        value = loss(lambda given: rpc.rpc_sync("worker1", cubed, args=(given,)), x, w)
        (gradient,) = autograd.grad(context_id, [value], [x], create_graph=True)
        found = autograd.grad(context_id, [penalized(gradient, value)], [x, w])
    value = loss(cubed, x, w)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    expected = torch.autograd.grad(penalized(gradient, value), [x, w])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_backward_that_records_its_graph(pair: Cluster) -> None:
    warm()
    x = torch.full((5,), 2.0, device="cuda", requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", cubed, args=(x,))
        autograd.backward(context_id, [y.sum()], create_graph=True)
        first = autograd.get_gradients(context_id)[x]
        assert first.unique().tolist() == [12.0]
        (second,) = autograd.grad(context_id, [first.sum()], [x])
    assert second.unique().tolist() == [12.0]
