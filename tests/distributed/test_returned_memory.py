"""What a worker gives back of what it was given: equal to one process, whoever keeps or changes what, then or later.

A tensor that came with a call and goes back with its reply lies in the same memory again, if nobody on the worker holds
it. Nobody may be able to tell: here each crossing is taken to copy, and every value must be what it would be then.
`regained` counts the replies that came without a copy, so that the tests of it are about what they say.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.rpc.current import require_agent
from telegrad.transport.blocks.lending import Lender
from tests.cluster import Cluster

SIZE = 65_536  # floats: 256 KB, beyond the size from which memory is shared


# --- what runs on the workers ---

kept: list[Any] = []


def echo(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def first_of(x: Tensor, y: Tensor) -> Tensor:
    return x


def swap(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y, x


def part_of(x: Tensor) -> Tensor:
    return x[SIZE // 4 :]


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def with_a_part(x: Tensor) -> dict[str, Tensor]:
    return {"all": x, "part": x[10:]}


def keep(x: Tensor) -> Tensor:
    kept.append(x)
    return x


def keep_a_view(x: Tensor) -> Tensor:
    kept.append(x[1:])
    return x


def keep_an_array(x: Tensor) -> Tensor:
    kept.append(x.numpy())
    return x


def keep_the_storage(x: Tensor) -> Tensor:
    kept.append(x.untyped_storage())
    return x


def keep_the_other(x: Tensor, y: Tensor) -> Tensor:
    kept.append(y)
    return x


def values_kept() -> list[list[float]]:
    """The least and the greatest in each thing kept."""
    return [sorted({float(_array(each).min()), float(_array(each).max())}) for each in kept]


def _array(each: Any) -> Any:
    if isinstance(each, torch.UntypedStorage):
        each = torch.empty(0).set_(each)
    return each.numpy() if isinstance(each, Tensor) else each


def change_kept(value: float) -> None:
    for each in kept:
        _array(each)[:] = value


def forget() -> None:
    kept.clear()


def keep_in_a_node(x: Tensor) -> Tensor:
    """What is needed for a gradient later."""
    kept.append(torch.full((SIZE,), 3.0, requires_grad=True))
    kept.append((kept[0] * x).sum())
    return x


def gradient_of_the_node() -> Tensor:
    kept[1].backward()
    gradient: Tensor = kept[0].grad
    return gradient


@rpc.functions.async_execution
def echo_by_a_future(x: Tensor) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(x)
    return future


async def echo_by_a_coroutine(x: Tensor) -> Tensor:
    return x


def pass_on(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, add_in_place, (x, torch.ones(SIZE)))


def send_elsewhere_and_return(x: Tensor) -> Tensor:
    """The call is still under way when the reply leaves."""
    kept.append(rpc.rpc_async("worker2", echo, (x,)))
    return x


def what_came_from_elsewhere() -> list[float]:
    return values(kept[0].wait())


# --- how it is looked at ---


@pytest.fixture
def regained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that came back to this process, as they come."""
    numbers: list[int] = []
    regain = Lender.regain

    def noted(lender: Lender, number: int) -> Any:
        numbers.append(number)
        return regain(lender, number)

    monkeypatch.setattr(Lender, "regain", noted)
    return numbers


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "job" in request.fixturenames:
        rpc.rpc_sync("worker1", forget)


def shares_memory() -> bool:
    agent = require_agent()
    return agent.link(agent.find("worker1")).connection().memory.lender is not None


def full(value: float) -> Tensor:
    return torch.full((SIZE,), float(value))


def values(x: Tensor) -> list[float]:
    """The least and the greatest; one, if all are equal."""
    return sorted({x.min().item(), x.max().item()})


# --- what comes back ---


def test_an_echo_comes_back_in_the_same_memory(job: Cluster, regained: list[int]) -> None:
    x = full(1)
    y = rpc.rpc_sync("worker1", echo, (x,))
    assert torch.equal(x, y)
    assert len(regained) == shares_memory()
    y.fill_(2)
    assert values(x) == [1]
    again = rpc.rpc_sync("worker1", echo, (full(3),))
    assert values(y) == [2]
    again.fill_(4)
    assert values(y) == [2]


def test_what_was_changed_in_place_comes_back_changed(job: Cluster, regained: list[int]) -> None:
    x, y = full(1), full(2)
    assert values(rpc.rpc_sync("worker1", add_in_place, (x, y))) == [3]
    assert len(regained) == shares_memory()
    assert values(x) == [1]
    assert values(y) == [2]


RETURNS: dict[str, tuple[Callable[..., Any], int]] = {
    "one of two": (first_of, 2),
    "both, swapped": (swap, 2),
    "a part": (part_of, 1),
    "the same twice": (twice, 1),
    "it and a part of it": (with_a_part, 1),
    "all of many": (echo, 5),
}


@pytest.mark.parametrize("what", RETURNS)
def test_it_is_what_one_process_would_get(job: Cluster, what: str) -> None:
    func, count = RETURNS[what]
    sent = [torch.arange(float(SIZE)) + SIZE * i for i in range(count)]
    expected = func(*copy.deepcopy(sent))
    got = rpc.rpc_sync("worker1", func, tuple(sent))
    flat, flat_expected = _tensors(got), _tensors(expected)
    for one, other in zip(flat, flat_expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(flat, flat_expected, strict=True):  # and shares its memory with what it should
        one.neg_()
        other.neg_()
    for one, other in zip(flat, flat_expected, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(x, torch.arange(float(SIZE)) + SIZE * i) for i, x in enumerate(sent))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def test_large_tensors_that_are_not_plain_come_back(job: Cluster) -> None:
    """Not all of them have a storage, or a number of bytes, that could be asked for."""
    dense = torch.arange(1.0, SIZE + 1).view(256, -1)
    for x in (
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_bsc((2, 2)),
        torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        torch.complex(dense, dense).conj(),
        dense.expand(3, 256, 256),
        dense.t(),
    ):
        got = rpc.rpc_sync("worker1", echo, (x,))
        assert got.layout == x.layout
        assert torch.equal(got, x) if x.is_quantized else torch.equal(got.to_dense(), x.to_dense())
    nested = torch.nested.nested_tensor([dense, 2 * dense])
    for one, other in zip(rpc.rpc_sync("worker1", echo, (nested,)).unbind(), nested.unbind(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("func", [keep, keep_a_view, keep_an_array, keep_the_storage], ids=lambda f: f.__name__)
def test_what_the_worker_keeps_is_its_own(job: Cluster, regained: list[int], func: Callable[..., Any]) -> None:
    """Neither sees what the other does with it, now or when the memory is used again."""
    y = rpc.rpc_sync("worker1", func, (full(1),))
    assert regained == []
    y.fill_(2)
    assert rpc.rpc_sync("worker1", values_kept) == [[1]]
    rpc.rpc_sync("worker1", change_kept, (3.0,))
    assert values(y) == [2]
    for _ in range(3):
        rpc.rpc_sync("worker1", echo, (full(5),))
    assert rpc.rpc_sync("worker1", values_kept) == [[3]]
    assert values(y) == [2]


def test_what_the_worker_keeps_of_the_same_message_is_its_own(job: Cluster, regained: list[int]) -> None:
    """Both lie in one block; one goes back, the other stays."""
    x = rpc.rpc_sync("worker1", keep_the_other, (full(1), full(2)))
    assert len(regained) == shares_memory()
    x.fill_(3)
    rpc.rpc_sync("worker1", change_kept, (4.0,))
    assert values(x) == [3]
    for _ in range(3):
        rpc.rpc_sync("worker1", echo, (full(5), full(6)))
    assert values(x) == [3]
    assert rpc.rpc_sync("worker1", values_kept) == [[4]]
    del x
    rpc.rpc_sync("worker1", echo, (full(5), full(6)))
    assert rpc.rpc_sync("worker1", values_kept) == [[4]]


def test_what_a_node_of_the_worker_needs_is_its_own(job: Cluster, regained: list[int]) -> None:
    y = rpc.rpc_sync("worker1", keep_in_a_node, (full(2),))
    assert regained == []
    y.fill_(9)
    assert values(rpc.rpc_sync("worker1", gradient_of_the_node)) == [2]


def test_what_the_worker_still_sends_elsewhere_is_its_own(job: Cluster) -> None:
    y = rpc.rpc_sync("worker1", send_elsewhere_and_return, (full(2),))
    y.fill_(9)
    assert rpc.rpc_sync("worker1", what_came_from_elsewhere) == [2]


def test_what_goes_through_two_workers(job: Cluster) -> None:
    y = rpc.rpc_sync("worker1", pass_on, ("worker2", full(2)))
    assert values(y) == [3]
    z = rpc.rpc_sync("worker1", pass_on, ("worker2", y))
    assert values(z) == [4]
    assert values(y) == [3]


@pytest.mark.parametrize("func", [echo_by_a_future, echo_by_a_coroutine], ids=lambda f: f.__name__)
def test_what_comes_back_later(job: Cluster, func: Callable[..., Any]) -> None:
    results = [rpc.rpc_sync("worker1", func, (full(i),)) for i in range(4)]
    for i, y in enumerate(results):
        assert values(y) == [i]
        y.fill_(-1)


def test_a_reference_to_what_was_sent(job: Cluster, regained: list[int]) -> None:
    """The owner keeps the value: what is fetched is a copy each time."""
    reference = rpc.remote("worker1", echo, (full(1),))
    first = reference.to_here()
    first.fill_(2)
    second = reference.to_here()
    assert values(second) == [1]
    assert values(first) == [2]
    assert regained == []


def test_to_itself(job: Cluster) -> None:
    x = full(1)
    y = rpc.rpc_sync("worker0", keep, (x,))
    z = rpc.rpc_sync("worker0", echo, (x,))
    y.fill_(2)
    z.fill_(3)
    assert (values(x), values(kept[-1]), values(y), values(z)) == ([1], [1], [2], [3])
    kept.clear()


def test_many_in_flight_do_not_touch_each_other(job: Cluster) -> None:
    """Blocks come back, are let go of and lent again all the time, on two links and in several threads."""
    count = 30
    for round_ in range(3):
        sent = [torch.full((262_144,), float(100 * round_ + i)) for i in range(count)]
        futures = [
            rpc.rpc_async(f"worker{1 + i % 2}", add_in_place if i % 3 else keep_the_other, (x, x))
            for i, x in enumerate(sent)
        ]
        results = [future.wait() for future in futures]
        for i, (x, y) in enumerate(zip(sent, results, strict=True)):
            assert values(x) == [100 * round_ + i]
            assert values(y) == [(100 * round_ + i) * (2 if i % 3 else 1)]
            y.fill_(-1)
        for worker in ("worker1", "worker2"):
            assert sorted(rpc.rpc_sync(worker, values_kept)) == sorted(
                [100.0 * round_ + i] for i in range(count) if i % 3 == 0 and f"worker{1 + i % 2}" == worker
            )
            rpc.rpc_sync(worker, forget)


# --- gradients ---

own = torch.full((SIZE,), 5.0, requires_grad=True)


def add_own(x: Tensor) -> Tensor:
    return x + own


def own_gradient(context_id: int) -> list[float]:
    return values(autograd.get_gradients(context_id)[own])


def change_own_gradient(context_id: int) -> None:
    autograd.get_gradients(context_id)[own].fill_(-7)


def gradients_of(func: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """In one process."""
    fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    (func(*fresh) * weights()).sum().backward()
    return [leaf.grad for leaf in fresh]


def weights() -> Tensor:
    return torch.arange(1.0, SIZE + 1)


def view_of(x: Tensor) -> Tensor:
    return x.view_as(x)


@pytest.mark.parametrize(("func", "count"), [(echo, 1), (view_of, 1), (add, 2), (first_of, 2), (add_own, 1)])
def test_gradients_are_those_of_one_process_and_each_leaf_has_its_own(
    job: Cluster, func: Callable[..., Tensor], count: int
) -> None:
    """One gradient may have been meant for several leaves; they must not see what is done to it elsewhere."""
    leaves = [torch.rand(SIZE, requires_grad=True) for _ in range(count)]
    expected = gradients_of(func, leaves)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", func, tuple(leaves))
        autograd.backward(context_id, [(y * weights()).sum()])
        found = autograd.get_gradients(context_id)
        for leaf, gradient in zip(leaves, expected, strict=True):
            assert gradient is None or torch.equal(found[leaf], gradient)
        for i, leaf in enumerate(leaves):
            if leaf in found:
                found[leaf].fill_(-i)
        for i, leaf in enumerate(leaves):
            assert leaf not in found or values(found[leaf]) == [-i]


other = torch.full((SIZE,), 6.0, requires_grad=True)


def add_elsewhere(x: Tensor) -> Tensor:
    return x + rpc.rpc_sync("worker2", add, (own, other))


def change_one_of_two(context_id: int) -> tuple[list[float], list[float]]:
    found = autograd.get_gradients(context_id)
    found[own].fill_(-1)
    return values(found[own]), values(found[other])


def test_leaves_in_the_middle_have_their_own_gradients(job: Cluster) -> None:
    x = torch.rand(SIZE, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", add_elsewhere, (x,))
        autograd.backward(context_id, [(y * full(2)).sum()])
        assert rpc.rpc_sync("worker1", change_one_of_two, (context_id,)) == ([-1], [2])
        assert values(autograd.get_gradients(context_id)[x]) == [2]


def test_a_gradient_that_went_on_is_not_the_workers_any_more(job: Cluster, regained: list[int]) -> None:
    x = torch.rand(SIZE, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", add, (x, full(1)))
        regained.clear()
        autograd.backward(context_id, [(y * weights()).sum()])
        assert len(regained) == shares_memory()
        gradient = autograd.get_gradients(context_id)[x]
        assert torch.equal(gradient, weights())
        for _ in range(3):
            rpc.rpc_sync("worker1", echo, (full(5),))
        assert torch.equal(gradient, weights())


def test_a_gradient_that_the_worker_uses_as_well_is_copied(job: Cluster) -> None:
    x = torch.rand(SIZE, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", add_own, (x,))
        autograd.backward(context_id, [(2 * y).sum() + (y * 0).sum()])
        gradient = autograd.get_gradients(context_id)[x]
        gradient.fill_(-3)
        assert rpc.rpc_sync("worker1", own_gradient, (context_id,)) == [2]
        rpc.rpc_sync("worker1", change_own_gradient, (context_id,))
        assert values(gradient) == [-3]


def look_up(table: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.embedding(rows, table, sparse=True)


def test_large_sparse_gradients(job: Cluster) -> None:
    """Two come back, so that one of them leaves before the worker is done, and one goes there."""
    tables = [torch.rand(1000, 64, requires_grad=True) for _ in range(2)]
    rows = torch.arange(0, 1000, 2)
    with autograd.context() as context_id:
        found = [rpc.rpc_sync("worker1", look_up, (table, rows)) for table in tables]
        echoed = rpc.rpc_sync("worker1", echo, (look_up(tables[0], rows),))
        autograd.backward(context_id, [(found[0] * 2).sum() + (found[1] * 3).sum() + echoed.sum()])
        gradients = [autograd.get_gradients(context_id)[table].to_dense() for table in tables]
    for gradient, value in zip(gradients, (3, 3), strict=True):
        assert values(gradient[::2]) == [value]
        assert values(gradient[1::2]) == [0]


def pass_sparse_on(table: Tensor, rows: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", look_up, (table * 1, rows))


def test_a_large_sparse_gradient_that_another_worker_hears(job: Cluster) -> None:
    table = torch.rand(1000, 64, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", pass_sparse_on, (table, torch.arange(1000)))
        autograd.backward(context_id, [(y * 2).sum()])
        assert values(autograd.get_gradients(context_id)[table].to_dense()) == [2]


def test_gradients_of_two_passes_add_up(job: Cluster) -> None:
    """The first one is kept in memory that came back; the second must not be added to it under way."""
    x = torch.rand(SIZE, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", add_own, (x,))
        loss = (y * weights()).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        first = autograd.get_gradients(context_id)[x]
        autograd.backward(context_id, [loss])
        assert torch.equal(first, weights())
        assert torch.equal(autograd.get_gradients(context_id)[x], 2 * weights())
        assert torch.equal(rpc.rpc_sync("worker1", _own_total, (context_id,)), 2 * weights())


def _own_total(context_id: int) -> Tensor:
    return autograd.get_gradients(context_id)[own]


# --- any program ---

HALF = 16_384  # floats: 64 KB


def act(steps: list[tuple[str, int, float]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Do to some tensors what a function may do to its arguments."""
    returned: list[Tensor] = []
    for what, which, value in steps:
        x = tensors[which % len(tensors)]
        match what:
            case "change":
                x += value
            case "keep":
                kept.append(x)
            case "keep view":
                kept.append(x[100:])
            case "keep array":
                kept.append(x.numpy())
            case "change kept":
                for each in kept:
                    torch.as_tensor(each).add_(value)
            case "forget":
                kept.clear()
            case "return":
                returned.append(x)
            case "return view":
                returned.append(x[: 1 + len(x) // 2])
    return tuple(returned)


def all_kept() -> list[Tensor]:
    return [torch.as_tensor(each).clone() for each in kept]


STEPS = st.tuples(
    st.sampled_from(
        ["change", "keep", "keep view", "keep array", "change kept", "forget", "return", "return", "return view"]
    ),
    st.integers(0, 2),
    st.integers(1, 9).map(float),
)
CALLS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.lists(STEPS, max_size=6), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


@pytest.mark.chaos
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_any_program_is_as_if_each_crossing_copied(job: Cluster, calls: list[Any]) -> None:
    """The same calls, on a worker and in this process. Between them the caller changes what it has.

    The long profile runs 2,000 programs on each transport."""
    rpc.rpc_sync("worker1", forget)
    kept.clear()
    real = [torch.full((HALF,), float(i)) for i in range(3)]
    model = copy.deepcopy(real)
    for number, (which, steps, changed) in enumerate(calls):
        got = rpc.rpc_sync("worker1", act, (steps, *[real[i % len(real)] for i in which]))
        crossed = copy.deepcopy([model[i % len(model)] for i in which])
        expected = copy.deepcopy(act(steps, *crossed))
        del crossed
        real, model = [*got, *real][:6], [*expected, *model][:6]
        del got, expected
        real[changed % len(real)].mul_(number + 2)
        model[changed % len(model)].mul_(number + 2)
        for one, other in zip(real, model, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(rpc.rpc_sync("worker1", all_kept), all_kept(), strict=True):
            assert torch.equal(one, other)
    kept.clear()
