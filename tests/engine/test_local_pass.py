"""`LocalPass`, one promise at a time. That it equals one backward on any program is in `test_local_pass_oracle`."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from telegrad.autograd.functions import Gradients, RecvNode, attach_recv, taker
from telegrad.errors import AutogradError, GradientMismatch
from telegrad.ids import MessageId, WorkerId
from tests.engine.alone import Alone
from tests.engine.programs import Forget

SHORT = 60.0  # seconds that nothing here needs


class Told:
    """Where the gradients of the Recvs go."""

    def __init__(self) -> None:
        self.of: dict[Any, Gradients | None] = {}

    def __call__(self, key: Any, gradients: Gradients | None) -> None:
        assert key not in self.of
        self.of[key] = gradients


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def received(*values: float) -> tuple[Tensor, RecvNode]:
    (tensor,), recv = attach_recv([torch.tensor(values or (1.0, 2.0))], MessageId(7), WorkerId(1))
    return tensor, recv


def local_pass(
    sends: dict[str, Tensor], recvs: dict[str, RecvNode] | None = None, *, retain_graph: bool = False
) -> tuple["Alone[str]", Told]:
    told = Told()
    edges = {key: [get_gradient_edge(tensor)] for key, tensor in sends.items()}
    return Alone(edges, recvs or {}, retain_graph=retain_graph, deliver=told), told


def run_whole(sends: dict[str, Tensor], recvs: dict[str, RecvNode] | None = None, **options: bool) -> "Alone[str]":
    """Hear ones for all sends, one after the other."""
    pass_, _ = local_pass(sends, recvs, **options)
    pass_.walk()
    for key, tensor in sends.items():
        pass_.hear(key, [torch.ones_like(tensor)])
        pass_.run()
    assert pass_.done
    return pass_


# ------------------------------------------------------------------------------------------- what the Recvs are told


def test_a_recv_that_nothing_reaches_is_told_at_the_start() -> None:
    x = leaf()
    _, unused = received()
    pass_, told = local_pass({"out": x * 2}, {"in": unused})
    pass_.walk()
    assert told.of == {"in": None}


def test_a_recv_whose_tensors_were_dropped_is_told_none() -> None:
    tensor, recv = received()
    del tensor
    pass_, told = local_pass({}, {"in": recv})
    pass_.walk()
    pass_.run()
    assert told.of == {"in": None}
    assert pass_.done


def test_gradients_leave_while_the_rest_still_runs() -> None:
    x = leaf()
    older = x * 2
    tensor, recv = received()
    out = older.sin() * tensor
    happened: list[str] = []
    older.register_hook(lambda _: happened.append("older node"))
    edges = {"out": [get_gradient_edge(out)]}
    pass_ = Alone(edges, {"in": recv}, retain_graph=False, deliver=lambda *_: happened.append("delivered"))
    pass_.walk()
    pass_.hear("out", [torch.ones(2)])
    pass_.run()
    assert happened == ["delivered", "older node"]


def test_a_recv_is_told_none_as_soon_as_all_that_reaches_it_is_dead() -> None:
    tensor, recv = received()
    x = leaf()
    pass_, told = local_pass({"a": tensor * x, "b": x * 3}, {"in": recv})
    pass_.walk()
    assert told.of == {}
    pass_.hear("a", None)
    pass_.run()
    assert told.of == {"in": None}
    assert pass_.unheard == ("b",)


def test_a_recv_that_no_gradient_reaches_is_told_before_the_rest_runs() -> None:
    tensor, recv = received()
    x = leaf()
    live = x * 2
    happened: list[str] = []
    live.register_hook(lambda _: happened.append("live node"))
    edges = {"both": [get_gradient_edge(live), get_gradient_edge(tensor * 3)]}
    pass_ = Alone(edges, {"in": recv}, retain_graph=False, deliver=lambda *told: happened.append(repr(told)))
    pass_.walk()
    pass_.hear("both", [torch.ones(2), None])
    pass_.run()
    assert happened == ["('in', None)", "live node"]


def test_a_shared_recv_leaves_before_the_rest_is_heard() -> None:
    """`b` may depend on this gradient: waiting for it would be waiting forever."""
    x = leaf()
    shared = x.exp()
    tensor, recv = received()
    pass_, told = local_pass({"a": shared * tensor, "b": shared * 3}, {"in": recv})
    pass_.walk()
    pass_.hear("a", [torch.ones(2)])
    pass_.run()
    assert torch.equal(told.of["in"][0], shared)
    assert not pass_.done
    pass_.hear("b", [torch.ones(2)])
    pass_.run()
    assert torch.allclose(pass_.gradients[x], shared * (tensor + 3))


def test_a_send_of_what_was_received_and_of_a_leaf() -> None:
    tensor, recv = received()
    x = leaf()
    edges = {"both": [get_gradient_edge(x), get_gradient_edge(tensor), get_gradient_edge(x)]}
    told = Told()
    pass_ = Alone(edges, {"in": recv}, retain_graph=False, deliver=told)
    pass_.walk()
    pass_.hear("both", [torch.ones(2), torch.full((2,), 5.0), torch.ones(2)])
    pass_.run()
    assert torch.equal(pass_.gradients[x], torch.full((2,), 2.0))
    assert torch.equal(told.of["in"][0], torch.full((2,), 5.0))


# ------------------------------------------------------------------------------------------------------- hearing


def test_hearing_what_was_not_sent_heard_twice_or_of_another_length_is_an_error() -> None:
    pass_, _ = local_pass({"out": leaf() * 2, "other": leaf() * 2})
    pass_.walk()
    with pytest.raises(AutogradError, match="'lost' is not a send of this pass, or was heard before"):
        pass_.hear("lost", None)
    with pytest.raises(GradientMismatch, match="'out' has 1 tensors, not 2"):
        pass_.hear("out", [None, None])
    assert pass_.unheard == ("out", "other")
    pass_.hear("out", None)
    with pytest.raises(AutogradError, match="'out' is not a send of this pass, or was heard before"):
        pass_.hear("out", None)


def test_what_is_heard_before_the_start_counts() -> None:
    x = leaf()
    pass_, _ = local_pass({"out": x * 2})
    pass_.hear("out", [torch.ones(2)])
    pass_.run()
    assert not pass_.done
    pass_.walk()
    pass_.run()
    assert torch.equal(pass_.gradients[x], torch.full((2,), 2.0))


def test_a_region_without_gradients_does_not_run() -> None:
    x = leaf()
    dead, live = x * 2, x * 3
    ran: list[str] = []
    dead.register_hook(lambda _: ran.append("dead"))
    pass_, _ = local_pass({"dead": dead, "live": live})
    pass_.walk()
    pass_.hear("dead", None)
    pass_.run()
    pass_.hear("live", [torch.ones(2)])
    pass_.run()
    assert ran == []
    assert torch.equal(pass_.gradients[x], torch.full((2,), 3.0))


def test_nothing_heard_leaves_no_gradients_and_fires_no_hooks() -> None:
    x = leaf()
    x.register_hook(lambda _: pytest.fail("no gradient came"))
    pass_, _ = local_pass({"out": x * 2})
    pass_.walk()
    pass_.hear("out", None)
    pass_.run()
    assert pass_.done
    assert pass_.gradients == {}


def test_a_node_that_gets_none_across_a_cut_is_visited_with_none() -> None:
    x = leaf()
    shared = x * 2
    tensor, recv = received()
    arrived: list[object] = []
    shared.grad_fn.register_hook(lambda _, gradients: arrived.append(gradients))
    x.register_hook(arrived.append)
    pass_, told = local_pass({"a": Forget.apply(tensor, shared), "b": shared * 3}, {"in": recv})
    pass_.walk()
    pass_.hear("a", [torch.ones(2)])
    pass_.run()
    assert told.of["in"] is not None
    assert arrived == []
    pass_.hear("b", None)
    pass_.run()
    assert arrived == [(None,), None]
    assert pass_.gradients == {}


# -------------------------------------------------------------------------------------------------------- leaves


def test_a_leaf_that_gets_none_early_is_visited_with_none() -> None:
    x, y = leaf(), leaf()
    arrived: list[object] = []
    x.register_hook(arrived.append)
    pass_ = run_whole({"early": Forget.apply(y, x), "late": leaf() * 2})
    assert arrived == [None]
    assert x not in pass_.gradients
    assert y in pass_.gradients


def test_grad_is_left_alone() -> None:
    x, y = leaf(), leaf()
    x.grad = before = torch.full((2,), 9.0)
    pass_ = run_whole({"a": x * y, "b": x * 3})
    assert x.grad is before
    assert torch.equal(before, torch.full((2,), 9.0))
    assert y.grad is None
    assert torch.equal(pass_.gradients[x], y + 3)


def test_a_leaf_hook_sees_the_total_once_and_may_change_it() -> None:
    x = leaf()
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 10

    x.register_hook(hook)
    pass_ = run_whole({"a": x * 2, "b": x * 3, "c": x * 4})
    assert [gradient.tolist() for gradient in seen] == [[9.0, 9.0]]
    assert torch.equal(pass_.gradients[x], torch.full((2,), 90.0))


def test_a_held_hook_still_fires_in_a_backward_of_its_own() -> None:
    x = leaf()
    seen: list[list[float]] = []
    handle = x.register_hook(lambda gradient: seen.append(gradient.tolist()))
    first, nested = x * 2, (x * 7).sum()
    first.register_hook(lambda _: seen.append(torch.autograd.grad(nested, x)[0].tolist()))
    run_whole({"a": first, "b": x * 3})
    assert seen == [[7.0, 7.0], [7.0, 7.0], [5.0, 5.0]], "the nested call's hook and result, then the total"
    assert x._backward_hooks is not None
    assert [type(hook).__name__ for hook in x._backward_hooks.values()] == ["function"]
    handle.remove()
    assert not x._backward_hooks


def test_a_hook_removed_while_it_is_held_stays_removed() -> None:
    x = leaf()
    handle = x.register_hook(lambda _: pytest.fail("it was removed"))
    first = x * 2
    first.grad_fn.register_hook(lambda *_: handle.remove())
    run_whole({"a": first, "b": x * 3})
    assert not x._backward_hooks


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_parts_of_one_leaf_add_up(sparse_first: bool) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    looked_up = table(torch.tensor([1, 1, 3]))
    sends = {"sparse": looked_up, "dense": table.weight * 2, "again": table(torch.tensor([0]))}
    if not sparse_first:
        sends = dict(reversed(sends.items()))
    expected = torch.full((4, 2), 2.0)
    expected[1] += 2
    expected[3] += 1
    expected[0] += 1
    assert torch.equal(run_whole(sends).gradients[table.weight], expected)


def test_sparse_parts_alone_stay_sparse() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    sends = {"a": table(torch.tensor([1])), "b": table(torch.tensor([1, 2]))}
    gradient = run_whole(sends).gradients[table.weight]
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense()[:, 0], torch.tensor([0.0, 2.0, 1.0, 0.0]))


def test_parts_that_came_early_reach_the_leaf_without_a_copy() -> None:
    x = leaf()
    parts: list[int] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            result = gradient * 2
            parts.append(result.data_ptr())
            return result

    pass_ = run_whole({"early": Watched.apply(x), "late": leaf() * 2})
    assert pass_.gradients[x].data_ptr() == parts[0]


def test_a_large_gradient_that_comes_for_a_leaf_is_taken_without_a_copy() -> None:
    x = torch.zeros(2**15, requires_grad=True)
    pass_: Alone[str] = Alone({"a": [get_gradient_edge(x)]}, {}, retain_graph=False, deliver=lambda *_: None)
    gradients: list[Tensor | None] = [torch.ones(2**15)]
    assert gradients[0] is not None
    came = gradients[0].data_ptr()
    pass_.walk()
    pass_.hear("a", gradients)
    pass_.run()
    assert pass_.gradients[x].data_ptr() == came


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_gradient_that_two_leaves_share_is_copied_for_both_and_one_that_nobody_shares_is_taken(when: str) -> None:
    given: list[int] = []

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
            return first + second

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            given.append(gradient.data_ptr())
            return gradient, gradient

    class Each(Both):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            mine, other = gradient * 2, gradient * 3
            given.extend((mine.data_ptr(), other.data_ptr()))
            return mine, other

    for function, taken in ((Both, False), (Each, True)):
        given.clear()
        x, y = leaf(), leaf()
        tested = function.apply(x, y)[0] * 2
        sends = {"early": tested, "late": leaf() * 2} if when == "early" else {"early": leaf() * 2, "late": tested}
        gradients = run_whole(sends).gradients
        assert gradients[x].data_ptr() != gradients[y].data_ptr()
        assert (gradients[x].data_ptr() in given) == (gradients[y].data_ptr() in given) == taken


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_reduces_the_total_once() -> None:
    model = nn.Linear(2, 2)
    parallel = DistributedDataParallel(model)
    reduced: list[list[Tensor]] = []

    def compare(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append([gradient.clone() for gradient in bucket.gradients()])
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() * 100)
        return done

    parallel.register_comm_hook(None, compare)
    tensor, recv = received()
    hidden = parallel(torch.ones(2))
    pass_ = run_whole({"a": hidden * tensor, "b": hidden * 3}, {"in": recv})
    total = (tensor + 3).detach()
    assert len(reduced) == 1
    by_shape = {gradient.dim(): gradient for gradient in reduced[0]}
    assert torch.allclose(by_shape[1], total)
    assert torch.allclose(pass_.gradients[model.bias], total * 100)
    assert model.bias.grad is None


# ------------------------------------------------------------------------------------------------ repeated passes


def test_a_second_pass_without_retain_graph_gives_torchs_error() -> None:
    x = leaf()
    out = x.exp()
    run_whole({"out": out}, retain_graph=True)
    run_whole({"out": out})
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run_whole({"out": out})


def test_a_region_that_was_cut_off_releases_what_it_saved() -> None:
    tensor, recv = received()
    shared = leaf().exp()
    sent = shared * tensor
    run_whole({"a": sent, "b": shared * 3}, {"in": recv})
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        sent.grad_fn(torch.ones(2))


def test_nodes_recorded_by_a_fresh_thread_are_cut_off_too() -> None:
    """A thread counts its nodes from 0, so the shared one may be the younger by its number."""
    x = leaf()
    tensor, recv = received()
    shared = x.exp()
    sends: dict[str, Tensor] = {}

    def record() -> None:
        sends["a"] = shared * tensor
        sends["b"] = shared * 3

    in_thread(record)
    numbers = {tensor: tensor.grad_fn._sequence_nr() for tensor in (shared, *sends.values())}
    assert numbers[sends["a"]] == 0
    pass_ = run_whole(sends, {"in": recv})
    assert torch.allclose(pass_.gradients[x], shared * (tensor + 3))
    assert numbers == {tensor: tensor.grad_fn._sequence_nr() for tensor in numbers}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode: Callable[[], Any]) -> None:
    x = leaf()
    tensor, recv = received()
    shared = x.exp()
    pass_, _ = local_pass({"a": shared * tensor, "b": shared * 3, "c": x * 2}, {"in": recv})
    with mode():
        pass_.walk()
        for key in ("a", "c", "b"):
            pass_.hear(key, [torch.ones(2)])
            pass_.run()
    assert torch.allclose(pass_.gradients[x], shared * (tensor + 3) + 2)


# ---------------------------------------------------------------------------------------------- failure and release


def test_an_error_in_a_hook_is_raised_and_ends_the_pass() -> None:
    x = leaf()
    x.grad = before = torch.zeros(2)
    tensor, recv = received()
    shared = x * 2

    def fail(_: Tensor) -> None:
        raise ArithmeticError("the hook's own")

    shared.register_hook(fail)
    pass_, told = local_pass({"a": shared * 3, "b": shared * tensor}, {"in": recv})
    pass_.walk()
    pass_.hear("a", [torch.ones(2)])
    pass_.hear("b", [torch.ones(2)])
    with pytest.raises(ArithmeticError, match="the hook's own"):
        pass_.run()
    assert x.grad is before
    assert taker() is None
    assert not pass_.done
    assert pass_.gradients == {}
    pass_.run()
    assert told.of == {}


def test_a_pass_that_is_over_takes_no_more_gradients() -> None:
    pass_, told = local_pass({"a": leaf() * 2, "b": leaf() * 2}, {"in": received()[1]})
    pass_.walk()
    pass_.abort()
    pass_.hear("a", [torch.ones(2)])
    pass_.run()
    assert not pass_.done
    assert (pass_.unheard, pass_.gradients, pass_.size) == ((), {}, 0)
    pass_.abort()
    assert told.of == {"in": None}


def test_a_pass_given_up_late_does_not_disturb_the_next_one() -> None:
    tensor, recv = received()
    out = tensor * 2
    first, _ = local_pass({"out": out}, {"in": recv})
    first.walk()
    second, told = local_pass({"out": out}, {"in": recv})
    second.walk()
    first.abort()
    second.hear("out", [torch.ones(2)])
    second.run()
    assert torch.equal(told.of["in"][0], torch.full((2,), 2.0))


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_pass_given_up_inside_the_engine_delivers_nothing_into_the_next(begins: str) -> None:
    """Both are in the engine at once, over one retained graph; each knows its own Recvs' gradients."""
    tensor, recv = received()
    out = tensor * 2
    first, told_first = local_pass({"out": out}, {"in": recv}, retain_graph=True)
    second, told_second = local_pass({"out": out}, {"in": recv}, retain_graph=True)
    entered: list[None] = []

    def succeed(_: Tensor) -> None:
        if not entered:
            entered.append(None)
            first.abort()
            if begins == "after":
                second.walk()
            second.hear("out", [torch.full((2,), 10.0)])
            in_thread(second.run)

    out.register_hook(succeed)
    first.walk()
    if begins == "before":
        second.walk()
    first.hear("out", [torch.ones(2)])
    first.run()
    assert told_first.of == {}
    assert torch.equal(told_second.of["in"][0], torch.full((2,), 20.0))


def test_a_backward_of_a_hook_through_what_came_later_is_refused_by_its_name() -> None:
    tensor, recv = received()
    later, _ = received()
    out = tensor * 2
    total = later.sum()
    out.register_hook(lambda _: total.backward())
    pass_, _ = local_pass({"out": out}, {"in": recv})
    pass_.walk()
    pass_.hear("out", [torch.ones(2)])
    with pytest.raises(AutogradError, match="after the backward pass that is running had begun, or in another context"):
        pass_.run()


def test_a_pass_given_up_while_it_starts_holds_nothing() -> None:
    _, recv = received()
    pass_ = Alone[str]({}, {"in": recv}, retain_graph=False, deliver=lambda *_: pass_.abort())
    pass_.walk()
    assert pass_.size == 0
    pass_.run()
    assert not pass_.done


def test_nothing_is_delivered_after_an_abort_from_another_thread() -> None:
    tensor, recv = received()
    out = tensor * 2
    pass_, told = local_pass({"out": out}, {"in": recv})
    out.register_hook(lambda _: in_thread(pass_.abort))
    pass_.walk()
    pass_.hear("out", [torch.ones(2)])
    pass_.run()
    assert told.of == {}


class Mark:
    """Lives as long as the node that holds it."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


@pytest.mark.parametrize("end", ["done", "aborted", "failed"])
def test_the_graph_is_released(end: str) -> None:
    gc.collect()
    gc.disable()
    try:
        x = leaf()
        tensor, recv = received()
        shared = Marked.apply(x, mark := Mark())
        if end == "failed":
            shared.register_hook(lambda _: 1 / 0)
        sends = {"a": shared * tensor, "b": shared * 3}
        alive = weakref.ref(mark)
        pass_, _ = local_pass(sends, {"in": recv})
        del shared, sends, tensor, recv, mark
        pass_.walk()
        pass_.hear("a", [torch.ones(2)])
        pass_.run()
        if end == "aborted":
            pass_.abort()
        else:
            pass_.hear("b", [torch.ones(2)])
            try:
                pass_.run()
            except ZeroDivisionError:
                assert end == "failed"
        assert pass_.done == (end == "done")
        assert alive() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------- threads


def in_thread(work: Callable[[], object]) -> None:
    """Run in another thread to its end, and raise here what it raised there."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(SHORT)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_the_running_thread_picks_up_what_another_hears() -> None:
    x, y = leaf(), leaf()
    first = x * 2
    pass_, _ = local_pass({"first": first, "second": y * 3})

    def hear_second() -> None:
        pass_.hear("second", [torch.ones(2)])
        pass_.run()  # returns at once: the other thread is in the middle of the first region
        assert not pass_.done

    first.register_hook(lambda _: in_thread(hear_second))
    pass_.walk()
    pass_.hear("first", [torch.ones(2)])
    pass_.run()
    assert pass_.done
    assert torch.equal(pass_.gradients[y], torch.full((2,), 3.0))


def test_many_threads_hear_and_none_is_lost() -> None:
    x = leaf()
    shared = x.exp()
    tensors, recvs = zip(*(received() for _ in range(16)), strict=True)
    sends = {str(number): shared * tensor for number, tensor in enumerate(tensors)}
    pass_, told = local_pass(sends, {str(number): recv for number, recv in enumerate(recvs)})
    pass_.walk()
    together = threading.Barrier(len(sends))

    def hear(key: str) -> None:
        together.wait(SHORT)
        pass_.hear(key, [torch.ones(2)])
        pass_.run()

    threads = [threading.Thread(target=hear, args=(key,)) for key in sends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SHORT)
    assert pass_.done
    assert set(told.of) == set(sends)
    assert torch.allclose(pass_.gradients[x], sum(tensor * shared for tensor in tensors))


def test_two_passes_over_the_same_leaf_do_not_mix() -> None:
    """The second pass begins while the first has the leaf: it runs what it can, and waits for the leaf."""
    x = leaf()
    seen: list[list[float]] = []
    x.register_hook(lambda gradient: seen.append(gradient.tolist()))
    x.grad = before = torch.zeros(2)
    ran = threading.Event()
    inner_pass, _ = local_pass({"inner": x * 3})
    inner_pass.hear("inner", [torch.ones(2)])
    inner_node = inner_pass.sends["inner"][0].node
    inner_node.register_hook(lambda *_: ran.set())
    thread = threading.Thread(target=inner_pass.walk)
    outer = x * 2

    def start_inner(_: Tensor) -> None:
        thread.start()
        assert ran.wait(SHORT)

    outer.register_hook(start_inner)
    outer_pass = run_whole({"outer": outer})
    thread.join(SHORT)
    assert inner_pass.done
    assert torch.equal(outer_pass.gradients[x], torch.full((2,), 2.0))
    assert torch.equal(inner_pass.gradients[x], torch.full((2,), 3.0))
    assert seen == [[2.0, 2.0], [3.0, 3.0]]
    assert x.grad is before


def test_a_hook_may_run_another_pass_over_the_same_leaf() -> None:
    x = leaf()
    inner: list[Tensor] = []
    outer, nested = x * 2, x * 3
    outer.register_hook(lambda _: inner.append(run_whole({"inner": nested}).gradients[x]))
    pass_ = run_whole({"outer": outer})
    assert torch.equal(inner[0], torch.full((2,), 3.0))
    assert torch.equal(pass_.gradients[x], torch.full((2,), 2.0))
