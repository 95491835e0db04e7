"""Messages of the autograd layer that do not fit: an error for their sender and the root, and a receiver unharmed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.attach import _Recorded
from telegrad.autograd.context import Context
from telegrad.autograd.registry import registry, within
from telegrad.engine.service import PassService
from telegrad.errors import AutogradError, ContextNotFound, GradientMismatch, ProtocolError
from telegrad.ids import COUNTER_BITS, ContextId, MessageId, PassId, PeerId, WorkerId, make_id, peer_id
from telegrad.rpc.current import require_agent
from telegrad.rpc.remote_errors import with_notes
from telegrad.wire.codec import Packed
from telegrad.wire.messages import (
    AbortPass,
    Ack,
    AnyMessage,
    AutogradMetadata,
    BeginPass,
    CleanupAutogradContext,
    CleanupAutogradContextReply,
    PassDone,
    PropagateGradients,
    PythonCall,
    PythonReply,
    RpcWithAutograd,
    TooLateForPass,
)
from tests.cluster import Cluster, cluster
from tests.distributed.test_autograd_failures import await_released
from tests.oracle.interpreter import await_empty

OTHER_INCARNATION = 1 << COUNTER_BITS
HERE, THERE = WorkerId(0), WorkerId(1)
NEVER = ContextId(make_id(PeerId(0), 123_456))


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made
        await_empty(3)


def ask(message: AnyMessage, tensors: list[Tensor] | None = None, worker: str = "worker1") -> AnyMessage:
    """Send a request as it is, and return the reply."""
    agent = require_agent()
    member = agent.find(worker)
    slot = agent.send(member, message, Packed(b"", tensors or []), timeout=60, what=lambda: str(message))
    agent.link(member).wait(slot)
    return agent.reply_frame(slot).message


def ask_from(message: AnyMessage, tensors: list[Tensor]) -> None:
    """What another worker is told to send to worker1."""
    ask(message, tensors)


def double(x: Tensor) -> Tensor:
    return x * 2


def via(worker: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(worker, double, (x * 3,)) * 5


def sends(context_id: int) -> list[int]:
    return list(registry().find(context_id).sends)


def has_begun(context_id: int) -> bool:
    return registry().find(context_id).came_too_late(MessageId(0), PassId(0))


def gradients_for(context_id: int, message_id: int, present: tuple[bool, ...]) -> PropagateGradients:
    metadata = AutogradMetadata(ContextId(context_id), MessageId(message_id))
    return PropagateGradients(metadata, PassId(make_id(PeerId(0), 1 << 30)), HERE, False, (), present)


def outside(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    with within(None):
        return rpc.rpc_sync(worker, function, args)


def assert_whole(context_id: int, x: Tensor, y: Tensor) -> None:
    """Nothing was begun, and the real pass works."""
    await_released()
    autograd.backward(context_id, [y.sum()], timeout=60)
    assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


WRONG: dict[str, tuple[int, tuple[bool, ...], list[Tensor], type[Exception], str]] = {
    "a message never sent": (
        10**6,
        (True,),
        [torch.ones(2)],
        AutogradError,
        "'worker1' never sent; they were not used",
    ),
    "of another incarnation": (OTHER_INCARNATION, (True,), [torch.ones(2)], AutogradError, "never sent"),
    "too many": (0, (True, True), [torch.ones(2)] * 2, GradientMismatch, "returned 2 gradients .* sent 1 tensors"),
    "fewer than announced": (0, (True, True), [torch.ones(2)], AutogradError, "1 gradients came .* 2 were announced"),
    "more than announced": (0, (), [torch.ones(2)], AutogradError, "1 gradients came .* 0 were announced"),
    "of another shape": (0, (True,), [torch.ones(3)], GradientMismatch, r"a gradient of \(3,\) .* which is \(2,\)"),
    "of another dtype": (0, (True,), [torch.ones(2).double()], GradientMismatch, "float64 .* which is .*float32"),
    "on another device": (0, (True,), [torch.ones(2, device="meta")], GradientMismatch, "on meta .* on cpu"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_gradients_that_do_not_fit(trio: Cluster, wrong: str) -> None:
    offset, present, tensors, kind, text = WRONG[wrong]
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", double, (x,))
        (message_id,) = outside("worker1", sends, context_id)
        with pytest.raises(kind, match=text) as caught:
            ask(gradients_for(context_id, message_id + offset, present), tensors)
        assert "On worker 'worker1'" in with_notes(caught.value)
        assert_whole(context_id, x, y)


def test_gradients_from_a_worker_that_was_sent_nothing(trio: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", double, (x,))
        (message_id,) = outside("worker1", sends, context_id)
        with pytest.raises(AutogradError, match=r"'worker2' returned gradients .* which went to worker 'worker0'"):
            outside("worker2", ask_from, gradients_for(context_id, message_id, (True,)), [torch.ones(2)])
        assert_whole(context_id, x, y)


@pytest.mark.parametrize(
    "context_id", [NEVER, ContextId(NEVER | OTHER_INCARNATION), ContextId(make_id(peer_id(999, 0), 0))]
)
def test_gradients_of_a_context_that_is_not_there(trio: Cluster, context_id: ContextId) -> None:
    with pytest.raises(ContextNotFound, match="on worker 'worker1': it has ended, or never was"):
        ask(gradients_for(context_id, 0, (True,)), [torch.ones(2)])
    await_released()


# --- the same in the middle of a pass: a participant that returns nonsense ---

_tell = PassService.tell


def corrupt(how: str) -> None:
    """From now on this worker returns gradients that do not fit."""

    def tell(self: PassService, pass_: Any, worker: WorkerId, message_id: MessageId, gradients: Any) -> None:
        if gradients is None or how == "nothing":
            _tell(self, pass_, worker, message_id, gradients)
        elif how == "shape":
            _tell(self, pass_, worker, message_id, [torch.ones(7) for _ in gradients])
        elif how == "number":
            _tell(self, pass_, worker, message_id, [*gradients, torch.ones(2)])
        else:
            _tell(self, pass_, worker, MessageId(message_id + 10**6), gradients)

    PassService.tell = tell


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", r"worker 2 returned a gradient of \(7,\)"),
        ("number", "worker 2 returned 2 gradients"),
        ("message", "worker 'worker2' returned gradients for message .* which worker 'worker1' never sent"),
    ],
)
def test_the_root_hears_of_it(trio: Cluster, how: str, text: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", via, ("worker2", x))
        outside("worker2", corrupt, how)
        with pytest.raises(AutogradError, match=text) as caught:
            autograd.backward(context_id, [y.sum()], retain_graph=True, timeout=60)
        outside("worker2", corrupt, "nothing")
        assert "n worker 'worker2'" in with_notes(caught.value)  # which was told by worker1, and told the root
        assert "On worker 'worker1'" in with_notes(caught.value)
        await_released()
        autograd.backward(context_id, [y.sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [30.0, 30.0]
    await_empty(3)


# --- the other messages ---


def test_a_pass_that_comes_before_the_calls_of_its_context(trio: Cluster) -> None:
    """It has nothing to do, but is remembered: a call that comes now is too late for it."""
    unheard = ContextId(make_id(PeerId(0), 234_567))
    reply = ask(BeginPass(unheard, PassId(0), HERE, False, ()))
    assert isinstance(reply, PassDone)
    assert reply.gradients == ()
    assert outside("worker1", has_begun, unheard)
    assert ask(CleanupAutogradContext(unheard, (HERE, THERE))) == CleanupAutogradContextReply()
    assert ask(BeginPass(unheard, PassId(1), HERE, False, ())) == PassDone((), ())  # ended: it stays so
    await_empty(3)


def test_what_ends_the_unknown_is_ignored(trio: Cluster) -> None:
    assert ask(CleanupAutogradContext(NEVER, (HERE, THERE))) == CleanupAutogradContextReply()
    assert ask(TooLateForPass(AutogradMetadata(NEVER, MessageId(0)), PassId(0))) == Ack()
    require_agent().notify(
        require_agent().find("worker1"), AbortPass(NEVER, PassId(0), "worker0", "no reason", "worker3", 1)
    )
    assert rpc.rpc_sync("worker1", double, (torch.ones(2),)).tolist() == [2.0, 2.0]


def test_an_abort_of_another_pass_changes_nothing(trio: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", double, (x,))
        other = AbortPass(ContextId(context_id), PassId(make_id(PeerId(0), 1 << 20)), "worker0", "no reason", "", 0)
        require_agent().notify(require_agent().find("worker1"), other)
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def test_a_call_in_a_context_that_has_ended(trio: Cluster) -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", double, (torch.ones(2),))
    await_empty(3)
    late = RpcWithAutograd(AutogradMetadata(ContextId(context_id), MessageId(0)), PythonCall(0, b""), False)
    with pytest.raises(ContextNotFound, match="reached worker 'worker1' too late"):
        ask(late)
    await_empty(3)


def test_a_recorded_call_wants_a_recorded_reply() -> None:
    context = Context(NEVER, HERE)
    with pytest.raises(ProtocolError, match="worker 1 answered a call of context"):
        _Recorded(context, THERE, MessageId(0))(PythonReply(), [])
    assert not context.recvs
