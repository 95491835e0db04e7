"""A context on its own: what it remembers, what it says of late messages, and what is left when it has ended."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad import autograd
from telegrad.autograd.attach import AutogradLayer, install, record_call
from telegrad.autograd.context import Context, add_gradients
from telegrad.autograd.functions import SendNode, attach_recv
from telegrad.autograd.registry import Registry, current, within
from telegrad.errors import AutogradError, ContextFailed, ContextNotFound, WorkerDied
from telegrad.ids import ContextId, MessageId, PassId, PeerId, WorkerId, draw_incarnation, make_id, peer_id
from telegrad.rpc.layer import Layers
from telegrad.wire.messages import Ping, PythonCall, RpcWithAutograd

PEER = WorkerId(1)
FIRST, SECOND = PassId(1), PassId(2)


def number(n: int) -> MessageId:
    return MessageId(n)


def make_context() -> Context:
    return Context(ContextId(make_id(PeerId(0), 7)), WorkerId(0))


def receive(context: Context, message_id: MessageId) -> None:
    _, recv = attach_recv([torch.zeros(2)], message_id, PEER)
    context.add_recv(recv)


def send(context: Context, message_id: MessageId) -> None:
    context.add_send(SendNode(message_id, PEER, [torch.zeros(2, requires_grad=True)]))


def ignore(message_id: MessageId, sender: WorkerId) -> None:
    pass


class Heard(list[tuple[MessageId, WorkerId]]):
    def __call__(self, message_id: MessageId, sender: WorkerId) -> None:
        self.append((message_id, sender))


def test_a_message_is_an_orphan_until_it_has_a_recv() -> None:
    context = make_context()
    context.arrived(number(1), PEER)
    context.arrived(number(2), PEER)
    receive(context, number(2))
    seen = context.snapshot(FIRST, ignore)
    assert seen.orphans == {number(1): PEER}
    assert [recv.message_id for recv in seen.recvs.values()] == [number(2)]


def test_what_comes_after_the_snapshot_is_late_once() -> None:
    context, late = make_context(), Heard()
    context.arrived(number(1), PEER)
    context.snapshot(FIRST, late)
    receive(context, number(1))  # the pass has told its sender: it was an orphan then
    context.arrived(number(2), PEER)
    receive(context, number(2))
    assert late == [(number(2), PEER)]


def test_a_later_pass_counts_what_was_late_for_an_earlier_one() -> None:
    context, first, second = make_context(), Heard(), Heard()
    context.snapshot(FIRST, first)
    context.arrived(number(1), PEER)
    receive(context, number(1))
    assert [recv.message_id for recv in context.snapshot(SECOND, second).recvs.values()] == [number(1)]
    context.arrived(number(2), PEER)
    assert (first, second) == ([(number(1), PEER)], [(number(2), PEER)])


def test_a_send_whose_message_came_too_late_there() -> None:
    context = make_context()
    send(context, number(1))
    assert not context.came_too_late(number(1), FIRST)  # not begun here: the pass will know when it begins
    assert context.snapshot(FIRST, ignore).alone == {number(1)}
    assert context.came_too_late(number(1), FIRST)  # begun: it has to be told
    assert context.snapshot(SECOND, ignore).alone == set()


def test_a_send_whose_message_never_left_hears_from_nobody() -> None:
    context = make_context()
    send(context, number(1))
    context.unsent.add(number(1))
    for pass_id in (FIRST, SECOND):
        assert context.snapshot(pass_id, ignore).alone == {number(1)}


def test_an_ended_context_takes_nothing_in() -> None:
    context, late = make_context(), Heard()
    send(context, number(1))
    receive(context, number(2))
    context.snapshot(FIRST, late)
    context.end()
    send(context, number(3))
    receive(context, number(4))
    assert (context.sends, context.recvs, context.gradients) == ({}, {}, {})
    with pytest.raises(AutogradError, match="has ended"):
        context.check_usable()


def test_a_failed_context_says_why() -> None:
    context = make_context()
    context.failure = WorkerDied("worker 'ps1' is gone.", worker="ps1", incarnation=7)
    with pytest.raises(ContextFailed, match=r"worker 'ps1' is gone\. Open a new context") as caught:
        context.check_usable()
    assert isinstance(caught.value, WorkerDied)
    assert (caught.value.worker, caught.value.incarnation) == ("ps1", 7)
    travelled = pickle.loads(pickle.dumps(caught.value))
    assert (type(travelled), str(travelled), travelled.worker) == (ContextFailed, str(caught.value), "ps1")


def test_gradients_add_up_pass_by_pass() -> None:
    context, leaf = make_context(), torch.zeros(2, requires_grad=True)
    for _ in range(3):
        context.accumulate({leaf: torch.ones(2)})
    assert context.gradients[leaf].tolist() == [3.0, 3.0]


def test_sums_do_not_change_what_was_given_out() -> None:
    context, leaf = make_context(), torch.zeros(2, requires_grad=True)
    context.accumulate({leaf: torch.ones(2)})
    given = context.gradients[leaf]
    context.accumulate({leaf: torch.ones(2)})
    assert given.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("sparse", [(False, False), (False, True), (True, False), (True, True)])
def test_dense_and_sparse_gradients_add_in_any_order(sparse: tuple[bool, bool]) -> None:
    one, other = (torch.eye(2).to_sparse() if is_sparse else torch.eye(2) for is_sparse in sparse)
    total = add_gradients(one, other)
    assert total.is_sparse == all(sparse)
    torch.testing.assert_close(total.to_dense() if total.is_sparse else total, 2 * torch.eye(2))


def test_repr() -> None:
    context = make_context()
    send(context, number(1))
    assert repr(context) == f"<Context {context.context_id}: 1 sent, 0 received>"
    context.latest = SimpleNamespace(waiting_for=lambda: ["worker 'ps0' (message 1)"])
    assert repr(context).endswith("1 sent, 0 received, waiting for worker 'ps0' (message 1)>")


# --- the registry ---


def make_agent(generation: int = 0) -> Any:
    """As much of an agent as the autograd layer touches."""
    member = SimpleNamespace(worker_id=WorkerId(3), incarnation=draw_incarnation(generation))
    layers = Layers()
    return SimpleNamespace(
        member=member,
        info=SimpleNamespace(name="worker3"),
        layers=layers,
        install=layers.install,
        layer=layers.layer,
        find_layer=layers.find,
    )


def test_a_worker_that_was_started_again_does_not_use_old_ids() -> None:
    before, after = (Registry(make_agent(generation)) for generation in (0, 1))
    assert before.open().context_id == make_id(peer_id(3, 0), 0)
    assert after.open().context_id == make_id(peer_id(3, 1), 0)
    assert before.next_message_id() != after.next_message_id()


def test_an_ended_context_does_not_come_back() -> None:
    registry = Registry(make_agent())
    context_id = ContextId(make_id(PeerId(0), 5))
    joined = registry.join(context_id)
    assert registry.join(context_id) is joined
    registry.end(context_id)
    with pytest.raises(ContextNotFound, match="has ended"):
        registry.join(context_id)
    with pytest.raises(ContextNotFound, match="Could not find autograd context with id: 5"):
        registry.find(context_id)
    assert len(registry) == 0


@pytest.mark.parametrize(
    "given", [[torch.ones(1)], torch.ones(2), autograd.context(), None, "3"], ids=lambda g: type(g).__name__
)
def test_what_is_no_id_is_refused_with_where_the_id_is(given: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"first argument is the id that `with autograd.context\(\) as context_id` gives, "
        f"got an object of {type(given).__name__}",
    ):
        Registry(make_agent()).find(given)


def test_the_memory_of_ended_contexts_is_bounded() -> None:
    registry = Registry(make_agent())
    for local in range(10_000):
        registry.end(ContextId(make_id(PeerId(0), local)))
    assert len(registry._ended) < 5_000


def test_closing_an_agent_ends_its_contexts() -> None:
    agent = make_agent()
    install(agent)
    registry = agent.layer(Registry)
    context = registry.open(strict=True)
    for layer in agent.layers:
        layer.on_close()
    assert context.ended
    assert len(registry) == 0
    assert registry.strict_context() is None


# --- what a call records ---

CALL = PythonCall(0, b"")


def test_a_call_in_a_context_is_wrapped_even_without_tensors() -> None:
    registry = AutogradLayer(make_agent())
    context = registry.open()
    with within(context):
        wrapped = record_call(registry, PEER, CALL, [torch.ones(2)])
    assert wrapped is not None
    message, _ = wrapped
    assert isinstance(message, RpcWithAutograd)
    assert message.metadata.context_id == context.context_id
    assert context.sends == {}
    assert context.participants == {PEER}


def test_a_send_counts_the_tensors_that_require_grad() -> None:
    registry = AutogradLayer(make_agent())
    context = registry.open()
    x = torch.ones(2, requires_grad=True)
    with within(context):
        record_call(registry, PEER, CALL, [torch.ones(2), x, torch.arange(3), x * 2])
    (sent,) = context.sends.values()
    assert len(sent.edges) == 2


def test_only_calls_of_a_user_are_recorded() -> None:
    registry = AutogradLayer(make_agent())
    with within(registry.open()):
        assert record_call(registry, PEER, Ping(), []) is None
    assert current.get() is None
    assert record_call(registry, PEER, CALL, [torch.ones(2, requires_grad=True)]) is None


def test_a_call_that_cannot_be_sent_leaves_its_send_alone() -> None:
    registry = AutogradLayer(make_agent())
    context = registry.open()
    with within(context):
        wrapped = record_call(registry, PEER, CALL, [torch.ones(2, requires_grad=True)])
    assert wrapped is not None
    wrapped[1].unsent()
    assert context.snapshot(FIRST, ignore).alone == set(context.sends)


def test_strictness_ends_with_its_context() -> None:
    registry = AutogradLayer(make_agent())
    x = torch.ones(2, requires_grad=True)
    context = registry.open(strict=True)
    with pytest.raises(AutogradError, match=f"strict context {context.context_id} is open: its gradient would be lost"):
        record_call(registry, PEER, CALL, [x])
    assert record_call(registry, PEER, CALL, [x.detach()]) is None
    registry.end(context.context_id)
    assert record_call(registry, PEER, CALL, [x]) is None
