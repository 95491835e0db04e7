"""A pass that fails: the caller gets the original error with the worker's name, and nobody is left holding anything."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry, within
from telegrad.engine.service import PassService
from telegrad.errors import AutogradError, RpcTimeout, SerializationError
from telegrad.rpc.current import require_agent
from tests.cluster import Cluster, cluster
from tests.oracle.interpreter import await_empty


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made
        await_empty(3)


class Broken(Exception):
    """An error of the user's, with more than a text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise Broken("this backward is broken", 42)


gate = threading.Event()
reached = threading.Event()
kept: list[Tensor] = []


class _Waits(torch.autograd.Function):
    """Its backward stays until the gate opens, so that a test can act in the middle of a pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        reached.set()
        assert gate.wait(90)
        return gradients[0] * 2


def double(x: Tensor) -> Tensor:
    return x * 2


def breaks(x: Tensor) -> Tensor:
    y: Tensor = _Breaks.apply(x)
    return y


def waits(x: Tensor) -> Tensor:
    gate.clear()
    reached.clear()
    y: Tensor = _Waits.apply(x)
    return y


def via(worker: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return rpc.rpc_sync(worker, function, (x * 3,)) * 5


def both(x: Tensor) -> Tensor:
    """Reached by two Sends, one of which will never hear."""
    kept.append(x * 2)
    return kept[-1] + rpc.rpc_sync("worker2", breaks, (kept[-1],))


def double_when_open(x: Tensor) -> Tensor:
    assert gate.wait(90)
    return x * 2


def close_gate() -> None:
    gate.clear()


def open_gate() -> None:
    gate.set()


def clear_reached() -> None:
    reached.clear()


def await_reached() -> bool:
    return reached.wait(60)


def fails_after_use(x: Tensor) -> None:
    rpc.rpc_sync("worker2", double, (x,))
    raise Broken("after some calls", 7)


def double_late(x: Tensor) -> Tensor:
    reached.set()
    assert gate.wait(90)
    return x * 2


def was_reached() -> bool:
    return reached.is_set()


def end_context(context_id: int) -> None:
    from telegrad.engine import end_context
    from telegrad.ids import ContextId

    end_context(require_agent().layer(PassService), ContextId(context_id))


def held() -> dict[str, Any]:
    """What passes hold on a worker: those that run, and the graph of one that does not."""
    service: PassService = require_agent().layer(PassService)
    return {
        "running": [repr(p) for p in service.passes() if not p.finished],
        "holding": [repr(p) for p in service.passes() if p.finished and p._graph is not None],
    }


def await_released(workers: int = 3) -> None:
    for worker in range(workers):
        await_that(lambda name=f"worker{worker}": not any(outside(name, held).values()))


def await_that(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def outside(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    """A call that is no part of the context a test is in."""
    with within(None):
        return rpc.rpc_sync(worker, function, args)


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("via_another", [False, True])
def test_the_original_error_arrives(trio: Cluster, via_another: bool) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = (
            rpc.rpc_sync("worker1", via, ("worker2", breaks, x))
            if via_another
            else rpc.rpc_sync("worker2", breaks, (x,))
        )
        with pytest.raises(Broken) as caught:
            autograd.backward(context_id, [y.sum()], timeout=60)
        assert caught.value.code == 42
        story = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "On worker 'worker2'" in story
        assert "in backward" in story
        await_released()
        # The context is as it was: another pass can run over what does not break, and it can end.
        autograd.backward(context_id, [rpc.rpc_sync("worker1", double, (x,)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]
    await_empty(3)


def test_a_worker_that_waits_in_vain_is_told(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", both, (x,))
        with pytest.raises(Broken):
            autograd.backward(context_id, [y.sum()], timeout=60)
        await_released()
    await_empty(3)


def test_an_error_at_the_root(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = breaks(rpc.rpc_sync("worker1", via, ("worker2", double, x)))
        with pytest.raises(Broken):
            autograd.backward(context_id, [y.sum()], timeout=60)
        await_released()
    await_empty(3)


def test_a_hook_that_raises(trio: Cluster) -> None:
    def refuse(_: Tensor) -> None:
        raise Broken("no gradient for me", 1)

    x = leaf()
    x.register_hook(refuse)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", via, ("worker2", double, x))
        with pytest.raises(Broken, match="no gradient for me"):
            autograd.backward(context_id, [y.sum()], timeout=60)
        await_released()


def test_a_context_that_ends_during_a_pass(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", waits, (x,))
        future = autograd.backward_async(context_id, [y.sum()], timeout=90)
        assert outside("worker1", await_reached)
    with pytest.raises(AutogradError, match="ended while a backward pass over it was running"):
        future.wait()
    outside("worker1", open_gate)
    await_released()
    await_empty(3)


def test_a_context_that_ends_on_a_participant(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", via, ("worker2", waits, x))
        future = autograd.backward_async(context_id, [y.sum()], timeout=90)
        assert outside("worker2", await_reached)
        outside("worker2", end_context, context_id)
        with pytest.raises(AutogradError, match="ended while a backward pass over it was running"):
            future.wait()
        outside("worker2", open_gate)
        await_released()
    await_empty(3)


def test_the_deadline_names_who_is_late(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", via, ("worker2", waits, x))
        with pytest.raises(RpcTimeout, match=r"Workers \['worker1', 'worker2'\] have not finished") as caught:
            autograd.backward(context_id, [y.sum()], timeout=0.2)
        assert "this worker waits for [\"worker 'worker1' (message" in str(caught.value)
        outside("worker2", open_gate)
        await_released()
    await_empty(3)


def hold(x: Tensor) -> Tensor:
    """As a cell that keeps a state on its worker."""
    before, kept[:] = [*kept], [x]
    return x * before[0] if before else x * 1.0


def let_go() -> None:
    kept.clear()


@pytest.mark.parametrize("where", ["the caller", "the worker"])
def test_what_one_step_hands_on_to_the_next(trio: Cluster, where: str) -> None:
    """Without `detach` a pass comes to what was received in a context before."""
    hidden, x = torch.ones(2), leaf()
    at_caller = where == "the caller"

    def step() -> Tensor:
        return rpc.rpc_sync("worker1", *((torch.mul, (hidden, x)) if at_caller else (hold, (x,))))

    with autograd.context() as first:
        hidden = step()
        autograd.backward(first, [hidden.sum()])
    sender = "worker1" if at_caller else "worker0"
    said = rf"received from worker '{sender}' in a context that has ended: .* Detach what one step hands on"
    with autograd.context() as second:
        hidden = step()
        with pytest.raises(AutogradError, match=said):
            autograd.backward(second, [hidden.sum()])
    rpc.rpc_sync("worker1", let_go)
    await_released()


def test_passes_over_one_context_do_not_overlap(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", waits, (x,)).sum()
        future = autograd.backward_async(context_id, [y], retain_graph=True)
        assert outside("worker1", await_reached)
        with pytest.raises(AutogradError, match="passes over one context run one after the other"):
            autograd.backward(context_id, [y])
        outside("worker1", open_gate)
        future.wait()
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def test_a_failed_call_leaves_the_context_usable(trio: Cluster) -> None:
    """Its tensors were sent, and some sent on; all of those Sends must hear that nothing comes."""
    x = leaf()
    with autograd.context() as context_id:
        with pytest.raises(Broken, match="after some calls"):
            rpc.rpc_sync("worker1", fails_after_use, (x * 2,))
        autograd.backward(context_id, [rpc.rpc_sync("worker1", double, (x,)).sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def unsendable(x: Tensor) -> Tensor:
    return (x * 3).to_mkldnn()


def test_a_result_that_cannot_be_sent_leaves_nothing_to_wait_for(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        with pytest.raises(SerializationError, match=r"layout is torch\._mkldnn"):
            rpc.rpc_sync("worker1", unsendable, (x,))
        autograd.backward(context_id, [rpc.rpc_sync("worker1", double, (x,)).sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def test_a_pass_given_up_in_a_hook_delivers_nothing_into_the_next(trio: Cluster) -> None:
    """Both are in the engine of one worker at once. Whichever comes to the Recv first, each has its own gradients."""
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", waits, (x,))
        with pytest.raises(RpcTimeout):
            autograd.backward(context_id, [(y * 7).sum()], retain_graph=True, timeout=0.2)
        outside("worker1", clear_reached)
        second = autograd.backward_async(context_id, [(y * 3).sum()], retain_graph=True, timeout=60)
        assert outside("worker1", await_reached)
        outside("worker1", open_gate)
        second.wait()
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0, 6.0]
        await_released()
    await_empty(3)


def test_a_function_that_does_not_exist_there(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        with pytest.raises(Exception, match="nowhere"):
            rpc.rpc_sync("worker1", OnlyHere.nowhere, (x * 2,))
        autograd.backward(context_id, [rpc.rpc_sync("worker1", double, (x,)).sum()], timeout=60)


class OnlyHere:
    """Pickles as something that no worker can find."""

    class _Nowhere:
        def __call__(self, x: Tensor) -> Tensor:
            return x

        def __reduce__(self) -> tuple[Any, ...]:
            return (_import_nowhere, ())

    nowhere = _Nowhere()


def _import_nowhere() -> Any:
    raise ModuleNotFoundError("nowhere to be found")


def test_a_reply_that_comes_too_late(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        for timeout in (0.05, 0.5, 5.0):  # on a busy machine it may be given up before it has begun
            outside("worker1", close_gate)
            outside("worker1", clear_reached)
            with pytest.raises(RpcTimeout):
                rpc.rpc_sync("worker1", double_late, (x,), timeout=timeout)
            if outside("worker1", was_reached):
                break
        # Whether the pass begins before the reply comes or after: its Send hears, and nobody waits in vain.
        autograd.backward(context_id, [rpc.rpc_sync("worker1", double, (x,)).sum()], timeout=60)
        outside("worker1", open_gate)
        await_that(lambda: bool(registry().find(context_id).orphans))
        autograd.backward(context_id, [rpc.rpc_sync("worker1", double, (x,)).sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0, 4.0]


def test_a_pass_does_not_wait_for_calls_under_way(trio: Cluster) -> None:
    x = leaf()
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", close_gate)
        still_running = rpc.rpc_async("worker1", double_when_open, (x,))
        y = rpc.rpc_sync("worker2", double, (x,))
        autograd.backward(context_id, [y.sum()], retain_graph=True, timeout=40)
        outside("worker1", open_gate)
        z = still_running.wait()
        autograd.backward(context_id, [y.sum() + z.sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0, 6.0]
