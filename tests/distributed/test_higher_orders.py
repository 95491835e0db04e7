"""Gradients of gradients over real workers: what people write with them, and what can go wrong."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.errors import AutogradError, RpcTimeout
from tests.cluster import Cluster, cluster
from tests.oracle.interpreter import await_empty


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def parameters(worker: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(worker)
    return [torch.randn(3, 3, generator=generator, dtype=torch.float64).mul(0.5).requires_grad_() for _ in range(2)]


WEIGHTS = {worker: parameters(worker) for worker in range(3)}
X = torch.randn(3, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def layer(worker: int, x: Tensor) -> Tensor:
    a, b = WEIGHTS[worker]
    return torch.tanh(x @ a) * torch.sin(x + b)


def chain(worker: int, x: Tensor, remote: bool = True) -> Tensor:
    y = layer(worker, x)
    if worker == 2:
        return y
    if remote:
        return y * 0.5 + rpc.rpc_sync(f"worker{worker + 1}", chain, (worker + 1, y))
    return y * 0.5 + chain(worker + 1, y, remote=False)


def weight(worker: int, number: int) -> Tensor:
    return WEIGHTS[worker][number]


def weights_of(worker: int) -> list[rpc.RRef[Tensor]]:
    return [rpc.remote(f"worker{worker}", weight, (worker, number)) for number in range(2)]


def fetched(values: Any) -> list[Any]:
    return [value.to_here() if isinstance(value, rpc.RRef) else value for value in values]


def close(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one.detach(), other.detach())


def leaf() -> Tensor:
    return X.clone().requires_grad_()


def test_a_gradient_penalty(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", chain, (1, x))
        (g,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True)
        assert autograd.get_gradients(context_id) == {}
        autograd.backward(context_id, [(g**2).sum()])
        ours = [autograd.get_gradients(context_id)[x], *dict(autograd.get_gradients(context_id, 1)).values()]
    (g,) = torch.autograd.grad(chain(1, x, remote=False).sum(), x, create_graph=True)
    theirs = torch.autograd.grad((g**2).sum(), [x, *WEIGHTS[1]])
    close(ours[:1], theirs[:1])
    assert len(ours) == 3
    for expected in theirs[1:]:
        assert any(torch.allclose(expected, found) for found in ours[1:])
    await_empty(3)


def test_hessian_vector_products_of_remote_parameters(trio: Cluster) -> None:
    x = leaf()
    remote = [*weights_of(1), *weights_of(2)]
    vectors = [torch.full_like(X, 0.1 * n) for n in range(1, 6)]
    with autograd.context() as context_id:
        loss = (rpc.rpc_sync("worker1", chain, (1, x)) ** 2).sum()
        products = autograd.hvp(context_id, loss, [x, *remote], vectors)
        assert [isinstance(product, rpc.RRef) for product in products] == [False, True, True, True, True]
        assert products[3].owner_name() == "worker2"
        ours = fetched(products)
    leaves = [x, *WEIGHTS[1], *WEIGHTS[2]]
    gradients = torch.autograd.grad((chain(1, x, remote=False) ** 2).sum(), leaves, create_graph=True)
    theirs = torch.autograd.grad([(g * v).sum() for g, v in zip(gradients, vectors, strict=True)], leaves)
    close(ours, theirs)


def test_vjp(trio: Cluster) -> None:
    x = leaf()
    unused = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", layer, (1, x))
        ours = fetched(autograd.vjp(context_id, [y], [x, *weights_of(1), unused], [X]))
    close(ours, [*torch.autograd.grad(layer(1, x), [x, *WEIGHTS[1]], X), None])


_fast: dict[int, list[Tensor]] = {}


def take_inner_step(worker: int, gradients: list[Any]) -> None:
    _fast[worker] = [p - 0.1 * g.local_value() for p, g in zip(WEIGHTS[worker], gradients, strict=True)]


def fast_layer(worker: int, x: Tensor) -> Tensor:
    a, b = _fast[worker]
    return torch.tanh(x @ a) * torch.sin(x + b)


def test_a_step_of_maml(trio: Cluster) -> None:
    x = leaf()
    one, two = weights_of(1), weights_of(2)
    with autograd.context() as context_id:
        loss = (rpc.rpc_sync("worker1", layer, (1, x)) ** 2).sum()
        loss = loss + (rpc.rpc_sync("worker2", layer, (2, x.sin())) ** 2).sum()
        gradients = autograd.grad(context_id, [loss], [*one, *two], create_graph=True)
        rpc.rpc_sync("worker1", take_inner_step, (1, list(gradients[:2])))
        rpc.rpc_sync("worker2", take_inner_step, (2, list(gradients[2:])))
        outer = (rpc.rpc_sync("worker2", fast_layer, (2, rpc.rpc_sync("worker1", fast_layer, (1, x)))) ** 2).sum()
        ours = fetched(autograd.grad(context_id, [outer], [x, *one, *two]))
    leaves = [x, *WEIGHTS[1], *WEIGHTS[2]]
    inner = (layer(1, x) ** 2).sum() + (layer(2, x.sin()) ** 2).sum()
    found = torch.autograd.grad(inner, leaves[1:], create_graph=True)
    _fast[1] = [p - 0.1 * g for p, g in zip(WEIGHTS[1], found[:2], strict=True)]
    _fast[2] = [p - 0.1 * g for p, g in zip(WEIGHTS[2], found[2:], strict=True)]
    close(ours, torch.autograd.grad((fast_layer(2, fast_layer(1, x)) ** 2).sum(), leaves))


def penalty_here(worker: int, context_id: int) -> Tensor:
    found = autograd.get_gradients(context_id)
    return torch.stack([(found[p] ** 2).sum() for p in WEIGHTS[worker] if p in found]).sum()


def loss_there(worker: int, x: Tensor) -> Tensor:
    return chain(worker, x).sum()


@pytest.mark.parametrize("way", ["backward", "async", "reference"])
def test_backward_with_a_graph_on_all_workers(trio: Cluster, way: str) -> None:
    x = leaf()
    with autograd.context() as context_id:
        loss = rpc.remote("worker1", loss_there, (1, x))
        if way == "backward":
            autograd.backward(context_id, [loss], create_graph=True)
        elif way == "async":
            autograd.backward_async(context_id, [loss], create_graph=True).wait()
        else:
            loss.backward(context_id, create_graph=True)
        parts = [rpc.rpc_sync(f"worker{n}", penalty_here, (n, context_id)) for n in (1, 2)]
        ours = fetched(autograd.grad(context_id, parts, [x, *weights_of(1), *weights_of(2)]))
    leaves = [x, *WEIGHTS[1], *WEIGHTS[2]]
    gradients = torch.autograd.grad(chain(1, x, remote=False).sum(), leaves[1:], create_graph=True)
    close(ours, torch.autograd.grad(sum((g**2).sum() for g in gradients), leaves))
    await_empty(3)


def test_inputs_of_all_kinds(trio: Cluster) -> None:
    """Leaves, what was computed here, what was received, references to what lives here; each with its hooks."""
    x = leaf()
    seen: list[str] = []
    with autograd.context() as context_id:
        h = x * 2
        y = rpc.rpc_sync("worker1", layer, (1, h))
        for name, tensor in (("x", x), ("h", h), ("y", y)):
            tensor.register_hook(lambda g, name=name: seen.append(name))
        own = rpc.RRef(h)
        ours = autograd.grad(context_id, [(y**2).sum()], [x, h, y, own], retain_graph=True)
        assert isinstance(ours[3], rpc.RRef)
        assert sorted(seen) == ["h", "x", "y"]
        ours = (*ours[:3], ours[3].to_here())
        again = autograd.grad(context_id, [(y**2).sum()], [h])
        close(again, ours[1:2])
    h = x * 2
    y = layer(1, h)
    theirs = torch.autograd.grad((y**2).sum(), [x, h, y])
    close(ours, (*theirs, theirs[1]))


# --- what goes wrong ---


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("create_graph", [False, True])
def test_nested_inputs(trio: Cluster, create_graph: bool) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    plain = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        direct = rpc.rpc_sync("worker1", torch.mul, (nested, 2.0))
        inner = rpc.rpc_sync("worker1", torch.mul, (nested * 3.0, 4.0))
        loss = (direct + inner).to_padded_tensor(0.0).sum() + rpc.rpc_sync("worker2", torch.mul, (plain, 5.0)).sum()
        first, second = autograd.grad(context_id, [loss], [nested, plain], create_graph=create_graph)
    assert [part.tolist() for part in first.unbind()] == [[14.0] * 2, [14.0] * 3]
    assert second.tolist() == [5.0] * 3


def test_one_tensor_or_reference_needs_no_list(trio: Cluster) -> None:
    x, elsewhere, vector = leaf(), weights_of(1)[0], torch.ones_like(X)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", layer, (1, x))
        ours = autograd.grad(context_id, y.sum(), x, retain_graph=True)
        assert type(ours) is tuple
        close(ours, torch.autograd.grad(layer(1, x).sum(), x))
        for product in (autograd.grad, autograd.vjp):
            close(product(context_id, y, x, vector, retain_graph=True), ours)
        listed = autograd.grad(context_id, [y.sum()], [elsewhere], retain_graph=True)
        close(fetched(autograd.grad(context_id, y.sum(), elsewhere, retain_graph=True)), fetched(listed))
        squared = (y * y).sum()
        ours = autograd.hvp(context_id, squared, x, vector, retain_graph=True)
        close(ours, autograd.hvp(context_id, squared, [x], [vector]))
    await_empty(3)


def test_unused_inputs_and_wrong_ones(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", layer, (1, x)).sum()
        elsewhere = weights_of(2)[0]
        with pytest.raises(AutogradError, match=r"inputs \[1\].*not have been used in the graph"):
            autograd.grad(context_id, [y], [x, elsewhere], retain_graph=True)
        ours = autograd.grad(context_id, [y], [x, elsewhere], retain_graph=True, allow_unused=True)
        assert ours[1] is None
        with pytest.raises(AutogradError, match=r"input 0 of grad.*does not require grad"):
            autograd.grad(context_id, [y], [torch.ones(2)])
        constant = rpc.remote("worker1", torch.ones, (2,))
        with pytest.raises(AutogradError, match=r"input 1 of grad.*does not require grad"):
            autograd.grad(context_id, [y], [x, constant], retain_graph=True)
        with pytest.raises(
            TypeError, match="inputs must be a tensor, a reference, or a list of these, got dict_values"
        ):
            autograd.grad(context_id, [y], {"x": x}.values())
        with pytest.raises(TypeError, match="outputs must be a tensor, a reference, or a list of these, got int"):
            autograd.grad(context_id, 1, [x])
        with pytest.raises(ValueError, match="2 vectors were given for 1 inputs"):
            autograd.hvp(context_id, y, [x], [x, x])
        close(autograd.grad(context_id, [y], [x]), torch.autograd.grad(layer(1, x).sum(), x))  # all is well again
    await_empty(3)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _broken:
            raise ZeroDivisionError("on its way back")
        return gradient * 1


_broken: list[bool] = []


def break_it(yes: bool) -> None:
    _broken[:] = [True] if yes else []


def fragile(worker: int, x: Tensor) -> Tensor:
    return layer(worker, Broken.apply(layer(worker, x)))


def test_a_pass_that_fails_leaves_a_graph_that_can_be_used(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", fragile, (1, x))
        rpc.rpc_sync("worker1", break_it, (True,))
        with pytest.raises(ZeroDivisionError):
            autograd.grad(context_id, [y.sum()], [x, *weights_of(1)], create_graph=True, timeout=60)
        rpc.rpc_sync("worker1", break_it, (False,))
        (g,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True, timeout=60)
        (h,) = autograd.grad(context_id, [(g**2).sum()], [x], timeout=60)
    (g,) = torch.autograd.grad(fragile(1, x).sum(), x, create_graph=True)
    close([h], torch.autograd.grad((g**2).sum(), x))
    await_empty(3)


def test_a_timeout(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", slow, (x,))
        with pytest.raises(RpcTimeout, match="worker1"):
            autograd.grad(context_id, [y.sum()], [x], create_graph=True, timeout=0.2)
        rpc.rpc_sync("worker1", let_through)
    await_empty(3)


_gate = threading.Event()


def let_through() -> None:
    _gate.set()


def slow(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda _: _gate.wait(60) and None)
    return y.sin()
