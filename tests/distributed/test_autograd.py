"""What a user of contexts and `backward` can rely on, over real processes: torch's meaning, and what goes beyond it."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry
from telegrad.engine.local.graph import Graph
from telegrad.errors import AutogradError, ContextNotFound
from tests.cluster import Cluster, cluster
from tests.oracle.interpreter import await_empty


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made
        await_empty(3)


# --- what runs on the workers ---

weight = torch.tensor([2.0, 3.0], requires_grad=True)
frozen = torch.tensor([5.0, 7.0])
kept: dict[str, Any] = {}


def scale(x: Tensor) -> Tensor:
    return x * weight


def scale_via(worker: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(worker, scale, (x,)) * weight


def keep(name: str, x: Tensor) -> None:
    kept[name] = x * weight


def use_kept(name: str, x: Tensor) -> Tensor:
    return kept[name] * x


def backward_from_kept_and_nested(context_id: int, nested: Tensor) -> None:
    padded = nested.to_padded_tensor(0.0)
    autograd.backward(context_id, [kept.pop("beside").sum() + (padded * 3).sum()])


def change_kept(name: str) -> None:
    kept[name].mul_(10)


def scale_and_change_at(worker: str, x: Tensor) -> Tensor:
    rpc.rpc_sync(worker, change_kept, ("sent",))
    return x * weight


def forget(name: str) -> None:
    kept.pop(name, None)


def two_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * weight, x + weight


def mixed(values: dict[str, Any]) -> dict[str, Any]:
    x, index, plain = values["x"], values["index"], values["plain"]
    return {"y": x[index] * plain * weight, "index": index, "plain": plain, "text": "same"}


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def gradient_of_weight(context_id: int) -> Tensor | None:
    return autograd.get_gradients(context_id).get(weight)


def contexts() -> int:
    return len(registry())


def context_id_here() -> int | None:
    from telegrad.autograd.registry import current

    context = current.get()
    return None if context is None else context.context_id


def run_backward(context_id: int, x: Tensor) -> None:
    autograd.backward(context_id, [scale(x).sum()])


embedding = nn.Embedding(4, 2, sparse=True)


def embed(rows: Tensor) -> Tensor:
    found: Tensor = embedding(rows)
    return found


def gradient_of_embedding(context_id: int) -> Tensor:
    return autograd.get_gradients(context_id)[embedding.weight]


class _Meets(torch.autograd.Function):
    """Its backward leaves a sign, and waits until it sees another's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sign: str, other: str) -> Tensor:
        ctx.sign, ctx.other = Path(sign), Path(other)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.sign.touch()
        deadline = time.monotonic() + 60
        while not ctx.other.exists():
            assert time.monotonic() < deadline, f"{ctx.other.name} never came"
            time.sleep(0.001)
        return gradients[0] * 2, None, None


def meets(x: Tensor, sign: str, other: str) -> Tensor:
    y: Tensor = _Meets.apply(x, sign, other)
    return y


def leaf() -> Tensor:
    return torch.tensor([0.5, -1.0], requires_grad=True)


# --- contexts ---


def test_gradients_flow_through_a_call(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, (x,)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 3.0]
        assert rpc.rpc_sync("worker1", gradient_of_weight, (context_id,)).tolist() == [0.5, -1.0]
    assert x.grad is None


def test_contexts_do_not_nest_in_one_thread(trio: Cluster) -> None:
    with (
        autograd.context(),
        pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"),
        autograd.context(),
    ):
        pass
    with autograd.context():  # the failed one has left nothing behind
        pass


def test_outside_a_context_nothing_is_recorded(trio: Cluster) -> None:
    await_empty(3)  # word that a context of another test has ended may be on its way
    y = rpc.rpc_sync("worker1", scale, (leaf(),))
    assert y.is_leaf
    assert rpc.rpc_sync("worker1", contexts) == 0


def test_a_call_takes_its_context_along(trio: Cluster) -> None:
    with autograd.context() as context_id:
        assert rpc.rpc_sync("worker1", context_id_here) == context_id
        assert rpc.rpc_sync("worker2", rpc.rpc_sync, ("worker1", context_id_here)) == context_id
    assert rpc.rpc_sync("worker1", context_id_here) is None


def test_no_grad_is_honoured(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        with torch.no_grad():
            y = rpc.rpc_sync("worker1", scale, (x,))
        assert not y.requires_grad
        assert autograd.inspect_context(context_id)["sends"] == {}
        z = rpc.rpc_sync("worker1", scale, (x,))
        autograd.backward(context_id, [(y * z).sum()])
        expected = (y * weight).tolist()
        assert autograd.get_gradients(context_id)[x].tolist() == expected


def test_each_thread_has_its_own_context(trio: Cluster) -> None:
    together = threading.Barrier(4)

    def step(number: int) -> tuple[int, list[float]]:
        x = leaf()
        with autograd.context() as context_id:
            together.wait()
            y = rpc.rpc_sync("worker1", scale_via, ("worker2", x)) * number
            autograd.backward(context_id, [y.sum()])
            return context_id, autograd.get_gradients(context_id)[x].tolist()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(step, range(4)))
    assert len({context_id for context_id, _ in results}) == 4
    assert [gradient for _, gradient in results] == [[4.0 * n, 9.0 * n] for n in range(4)]


@pytest.mark.slow
def test_a_thousand_contexts_open_at_once(trio: Cluster) -> None:
    await_empty(3)  # word that a context of another test has ended may be on its way
    x = leaf()
    opened: list[tuple[Any, int, Tensor]] = []

    def open_one() -> None:
        made = autograd.context()
        context_id = made.__enter__()
        opened.append((made, context_id, rpc.rpc_sync("worker1", scale, (x,))))

    flows = []
    for _ in range(1000):
        flow = contextvars.copy_context()
        flow.run(open_one)
        flows.append(flow)
    assert rpc.rpc_sync("worker1", contexts) == 1000
    for flow, (made, context_id, y) in zip(flows, opened, strict=True):
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 3.0]
        flow.run(made.__exit__, None, None, None)
    await_empty(3)


def test_coroutines_have_their_own_contexts(trio: Cluster) -> None:
    async def step(number: int) -> list[float]:
        x = leaf()
        with autograd.context() as context_id:
            y = await rpc.rpc_async("worker1", scale, (x,))
            await autograd.backward_async(context_id, [(y * number).sum()])
            return autograd.get_gradients(context_id)[x].tolist()

    async def both() -> list[list[float]]:
        return await asyncio.gather(step(1), step(2))

    assert asyncio.run(both()) == [[2.0, 3.0], [4.0, 6.0]]


@pytest.mark.parametrize("of_this_worker", [True, False])
def test_a_context_that_never_was(trio: Cluster, of_this_worker: bool) -> None:
    context_id = 987_654 if of_this_worker else 1 << 48 | 987_654
    with pytest.raises(ContextNotFound, match="Could not find autograd context with id"):
        autograd.get_gradients(context_id)
    with pytest.raises(ContextNotFound, match="it has ended, or never was"):
        autograd.backward(context_id, [leaf().sum()])
    with pytest.raises(ContextNotFound, match="'worker1'"):
        autograd.get_gradients(context_id, worker="worker1")


def test_a_context_that_has_ended(trio: Cluster) -> None:
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, (leaf(),))
    with pytest.raises(ContextNotFound):
        autograd.backward(context_id, [y.sum()])
    with pytest.raises(AutogradError, match="no backward pass of their context is running"):
        y.sum().backward()


def test_strict_contexts_notice_what_would_be_lost(trio: Cluster) -> None:
    x = leaf()

    def from_a_new_thread(tensor: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(rpc.rpc_sync, "worker1", scale, (tensor,)).result()

    with autograd.context(strict=True):
        rpc.rpc_sync("worker1", scale, (x,))
        with torch.no_grad():
            rpc.rpc_sync("worker1", scale, (x,))
        with pytest.raises(AutogradError, match="outside any context"):
            from_a_new_thread(x)
        from_a_new_thread(x.detach())
    from_a_new_thread(x)
    with autograd.context():
        from_a_new_thread(x)


# --- passes ---


def test_unused_results_cost_no_wait(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        used, unused = rpc.rpc_sync("worker1", two_of, (x,))
        rpc.rpc_sync("worker2", scale_via, ("worker1", x))
        aside = unused * 2  # a branch that does not reach the loss
        rpc.remote("worker2", scale, (x,))  # never fetched
        autograd.backward(context_id, [used.sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 3.0]
    assert aside.requires_grad


def test_passes_accumulate(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale_via, ("worker2", x)).sum()
        for times in (1, 2, 3):
            autograd.backward(context_id, [y], retain_graph=times < 3)
            assert autograd.get_gradients(context_id)[x].tolist() == [4.0 * times, 9.0 * times]
        assert rpc.rpc_sync("worker2", gradient_of_weight, (context_id,)).tolist() == [3.0, -9.0]


def test_a_second_pass_needs_a_retained_graph(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, (x,)).sum()
        autograd.backward(context_id, [y])
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            autograd.backward(context_id, [y])
        # What the failed pass left does not disturb another.
        autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, (x,)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0, 6.0]


def test_values_kept_on_a_worker(trio: Cluster) -> None:
    x, z = leaf(), leaf()
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", keep, ("kept", x))
        first = rpc.rpc_sync("worker1", use_kept, ("kept", z))
        rpc.rpc_sync("worker1", use_kept, ("kept", z))
        autograd.backward(context_id, [first.sum()])
        gradients = autograd.get_gradients(context_id)
        assert gradients[x].tolist() == (z * weight).tolist()
        assert gradients[z].tolist() == (x * weight).tolist()
    rpc.rpc_sync("worker1", forget, ("kept",))


def test_a_pass_may_start_inside_a_call_of_its_context(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", run_backward, (context_id, x))
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 3.0]


def test_grad_tensors(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, (x,))
        with pytest.raises(RuntimeError, match="not a scalar"):
            autograd.backward(context_id, [y])
        autograd.backward(context_id, [y, y.sum()], grad_tensors=[torch.tensor([10.0, 100.0]), None])
        assert autograd.get_gradients(context_id)[x].tolist() == [22.0, 303.0]


def test_what_cannot_be_a_root(trio: Cluster) -> None:
    with autograd.context() as context_id:
        with pytest.raises(RuntimeError, match="requires_grad not set on"):
            autograd.backward(context_id, [torch.ones(())])
        with pytest.raises(RuntimeError, match="No tensors provided for gradient computation"):
            autograd.backward(context_id, [])
        with pytest.raises(TypeError, match="incompatible function arguments"):
            autograd.backward(context_id, leaf().sum())
        with pytest.raises(ValueError, match="grad_tensors"):
            autograd.backward(context_id, [leaf().sum()], grad_tensors=[])


def test_roots_that_live_on_another_worker(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.remote("worker1", scale, (x,))
        gradient = torch.tensor([1.0, 10.0])
        autograd.backward(context_id, [y], grad_tensors=[gradient])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 30.0]


def test_backward_without_waiting(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        future = autograd.backward_async(context_id, [rpc.rpc_sync("worker1", scale, (x,)).sum()])
        assert future.wait() is None
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 3.0]
        future = autograd.backward_async(context_id, [torch.ones(())])
        with pytest.raises(RuntimeError, match="requires_grad not set on"):
            future.wait()


def test_several_workers_one_tensor(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        calls = [rpc.rpc_async(worker, scale, (x,)) for worker in ("worker0", "worker1", "worker2")]
        autograd.backward(context_id, [sum(call.wait() for call in calls).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0, 9.0]


def test_independent_workers_run_at_the_same_time(trio: Cluster, tmp_path: Path) -> None:
    x = leaf()
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", meets, (x, one, other))
        z = rpc.rpc_sync("worker2", meets, (x, other, one))
        autograd.backward(context_id, [(y + z).sum()], timeout=90)
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0, 4.0]


def test_gradients_leave_while_the_rest_still_runs(trio: Cluster, tmp_path: Path) -> None:
    x = leaf()
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    with autograd.context() as context_id:
        older = meets(x, here, there)  # runs after the Recv, and only ends when worker1 has its gradient
        y = rpc.rpc_sync("worker1", meets, (x, there, here))
        autograd.backward(context_id, [(older + y).sum()], timeout=90)
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0, 4.0]


def test_large_gradients(trio: Cluster) -> None:
    x = torch.rand(1 << 15, 2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale_via, ("worker2", x))
        autograd.backward(context_id, [(y * y).sum()])
        scaled = x * weight * weight
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], 2 * scaled * weight * weight)
        expected = (2 * scaled * x * weight).sum(0)
        torch.testing.assert_close(rpc.rpc_sync("worker2", gradient_of_weight, (context_id,)), expected)


# --- tensors ---


def test_parameters_keep_their_gradient(trio: Cluster) -> None:
    parameter = nn.Parameter(torch.tensor([0.5, -1.0]))
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, (parameter,)).sum()])
        assert autograd.get_gradients(context_id)[parameter].tolist() == [2.0, 3.0]


def test_sparse_gradients(trio: Cluster) -> None:
    with autograd.context() as context_id:
        for _ in range(2):
            autograd.backward(context_id, [rpc.rpc_sync("worker1", embed, (torch.tensor([1, 1, 3]),)).sum()])
        gradient = rpc.rpc_sync("worker1", gradient_of_embedding, (context_id,))
        assert gradient.is_sparse
        assert gradient.to_dense().tolist() == [[0.0, 0.0], [4.0, 4.0], [0.0, 0.0], [2.0, 2.0]]


def test_a_sparse_gradient_crosses(trio: Cluster) -> None:
    table = nn.Parameter(torch.ones(4, 2))
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", nn.functional.embedding, (torch.tensor([2, 2]), table), {"sparse": True})
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[table].to_dense()[2].tolist() == [2.0, 2.0]


def test_one_tensor_twice(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", product, (x, x)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == (2 * x).tolist()


def test_views_of_one_tensor(trio: Cluster) -> None:
    x = torch.arange(4.0, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", product, (x[:2], x.flip(0)[1:3].expand(3, 2)))
        autograd.backward(context_id, [y.sum()])
        here = torch.arange(4.0, requires_grad=True)
        product(here[:2], here.flip(0)[1:3].expand(3, 2)).sum().backward()
        assert autograd.get_gradients(context_id)[x].tolist() == here.grad.tolist()


def test_a_view_made_under_no_grad(trio: Cluster) -> None:
    x = leaf()
    with torch.no_grad():
        y = x[:1].expand(2)  # says that it requires grad, but leads nowhere
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", product, (x, y)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [0.5, 0.5]


def test_tensors_without_gradients_among_others(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        values = {"x": x, "index": torch.tensor([1, 0]), "plain": frozen, "more": [1, "two", None]}
        out = rpc.rpc_sync("worker1", mixed, (values,))
        assert out["y"].requires_grad
        assert not out["plain"].requires_grad
        assert out["index"].tolist() == [1, 0]
        autograd.backward(context_id, [out["y"].sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [7.0 * 3.0, 5.0 * 2.0]


def test_received_tensors_may_be_changed_in_place(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y, z = rpc.rpc_sync("worker1", two_of, (x,))
        y.mul_(2)
        z.add_(y)
        autograd.backward(context_id, [z.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [5.0, 7.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_leaf_beside_another_send(trio: Cluster) -> None:
    """The leaf waits for all that its worker hears, and takes the sum."""
    x, nested = leaf(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", keep, ("beside", x))
        rpc.rpc_sync("worker1", backward_from_kept_and_nested, (context_id, nested))
        found = autograd.get_gradients(context_id)
        assert [part.tolist() for part in found[nested].unbind()] == [[3.0] * 2, [3.0] * 3]
        assert found[x].tolist() == weight.tolist()


def test_a_worker_that_is_called_may_change_what_was_sent(trio: Cluster) -> None:
    """What was sent is the value before that, and its gradient goes there, whichever thread comes first."""
    x, factor = leaf(), torch.full((2,), 3.0, requires_grad=True)
    kept["sent"] = x * factor
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale_and_change_at, ("worker0", kept["sent"]))
        autograd.backward(context_id, [(y + kept.pop("sent")).sum()])
        found = autograd.get_gradients(context_id)
    # Of x * factor: the weights, and 10 by what it was changed to.
    assert found[factor].tolist() == (x * (weight + 10)).tolist()


# --- looking inside ---


def test_gradients_of_another_worker(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", scale_via, ("worker2", x)).sum()])
        for worker in ("worker1", "worker2"):
            ((theirs, gradient),) = autograd.get_gradients(context_id, worker=worker).items()
            assert theirs.tolist() == weight.tolist()
            assert gradient.tolist() == (x * weight).tolist()
        assert list(autograd.get_gradients(context_id, worker="worker0")) != []


def test_a_context_can_be_looked_at(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, (x,)).sum()
        seen = autograd.inspect_context(context_id)
        assert list(seen["sends"].values()) == [1]
        assert list(seen["receives"].values()) == [1]
        assert seen["participants"] == [1]
        assert seen["waiting_for"] == []
        assert repr(registry().find(context_id)) == f"<Context {context_id}: 1 sent, 1 received>"
        autograd.backward(context_id, [y])
        assert autograd.inspect_context(context_id)["gradients"] == 1


def test_a_running_pass_says_what_it_waits_for(trio: Cluster) -> None:
    x = leaf()
    waits = []
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, (x,))
        y.register_hook(lambda _: waits.extend(autograd.inspect_context(context_id)["waiting_for"]))
        autograd.backward(context_id, [y.sum()])
    assert len(waits) == 1
    assert waits[0].startswith("worker 'worker1' (message ")


def test_the_engine_is_not_asked_to_give_a_leaf_its_gradient_unless_it_is_observed(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run = Graph._call
    monkeypatch.setattr(Graph, "_call", lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs))[1])
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    x.grad = kept_grad = torch.zeros(2)

    def step(**more: Any) -> tuple[int, Tensor]:
        calls.clear()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, (x,)).sum()], **more)
            return len(calls), autograd.get_gradients(context_id)[x]

    for more, engine_calls in (({}, 1), ({"retain_graph": True}, 2)):
        count, gradient = step(**more)
        assert count == engine_calls and torch.equal(gradient, weight) and x.grad is kept_grad
    x.register_hook(lambda gradient: gradient * 2)
    count, gradient = step()
    assert count == 2 and torch.equal(gradient, 2 * weight)


@pytest.mark.parametrize(
    "register",
    [
        lambda x: x.register_hook(lambda gradient: gradient * 5),
        lambda x: x.view_as(x).grad_fn.next_functions[0][0].register_prehook(lambda gradients: (gradients[0] * 5,)),
    ],
    ids=["on the tensor", "on its node"],
)
def test_a_hook_that_is_registered_between_two_passes_of_a_context_fires(trio: Cluster, register: Any) -> None:
    """Nothing in this graph is freed by a pass, so that torch runs it twice."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.add, (x, 1.0)).sum()
        autograd.backward(context_id, [loss])
        register(x)
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 6.0))


def deep(x: Tensor) -> Tensor:
    """So many nodes that its gradient is not kept for the answer."""
    for _ in range(100):
        x = x + 1
    return x * 3


def test_a_leaf_whose_gradient_came_before_the_root_waits_keeps_it(trio: Cluster) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        late = (rpc.rpc_sync("worker2", torch.add, (y, 1.0)) * 2).sum()
        early = rpc.rpc_sync("worker1", deep, (x,)).sum()

        def wait_for_early(_: Tensor) -> None:
            """The engine is at this node, and has been at the other: its gradients have gone, and come back."""
            context = registry().find(context_id)
            deadline = time.monotonic() + 30
            while len(context.latest.waits()) > 1 and time.monotonic() < deadline:
                time.sleep(0.001)

        late.register_hook(wait_for_early)
        autograd.backward(context_id, [early + late])
        gradients = autograd.get_gradients(context_id)
        assert torch.equal(gradients[x], torch.full((2,), 3.0)) and torch.equal(gradients[y], torch.full((2,), 2.0))


def test_a_gradient_that_is_asked_for_leaves_none_in_the_context(trio: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        received = rpc.rpc_sync("worker1", torch.add, (x, 1.0))
        (gradient,) = autograd.grad(context_id, [(received * 2).sum()], [received])
        assert torch.equal(gradient, torch.full((2,), 2.0)) and not autograd.get_gradients(context_id)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("held", [False, True])
def test_backward_in_a_mode_without_gradients(trio: Cluster, mode: Any, held: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    elsewhere = x * 2 if held else None
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.add, (x, 1.0)).sum()
        with mode():
            autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones(2))
    del elsewhere
