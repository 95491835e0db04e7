"""One worker's part of a pass, without other workers: what it tells, what it hears, how it ends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.functions import SendNode, attach_recv
from telegrad.autograd.registry import Registry
from telegrad.autograd.walking import walk_ahead
from telegrad.engine.local import graph
from telegrad.engine.passes import Pass, Roots
from telegrad.engine.service import PassService
from telegrad.errors import AutogradError, GradientMismatch, WorkerDied
from telegrad.ids import ContextId, MessageId, PassId, WorkerId, draw_incarnation, make_id, peer_id
from telegrad.rpc.layer import Layers

HERE, PEER, ROOT = WorkerId(0), WorkerId(1), WorkerId(2)
SENT, RECEIVED, LATER = MessageId(1), MessageId(2), MessageId(3)


class Quiet(PassService):
    """A service that notes what it would send."""

    def __init__(self) -> None:
        member = SimpleNamespace(worker_id=HERE, incarnation=draw_incarnation(0))
        agent: Any = SimpleNamespace(member=member, info=SimpleNamespace(name="worker0"))
        agent.directory = SimpleNamespace(by_id=lambda _: None)
        layers = Layers()
        agent.layer, agent.find_layer = layers.layer, layers.find
        layers.install(Registry(agent))
        super().__init__(agent)
        self.said: list[tuple[Any, ...]] = []
        self.answered: list[Pass] = []

    def answer(self, request: Any, ended: Pass, carried: Any) -> None:
        self.answered.append(ended)

    def invite(self, pass_: Pass, worker: WorkerId) -> None:
        self.said.append(("invite", worker))

    def tell(self, pass_: Pass, worker: WorkerId, message_id: MessageId, gradients: Any) -> None:
        pass_.to_invite.discard(worker)
        self.said.append(("tell", worker, message_id, gradients and [g.tolist() for g in gradients]))

    def tell_too_late(self, pass_: Pass, worker: WorkerId, message_id: MessageId) -> None:
        self.said.append(("too late", worker, message_id))


class Part:
    """A worker that received `x`, multiplied it by a weight of its own and sent the product."""

    def __init__(self, *, used: bool = True) -> None:
        self.service = Quiet()
        self.context = self.service.registry.join(ContextId(make_id(peer_id(ROOT, 0), 0)))
        self.weight = torch.tensor([2.0, 3.0], requires_grad=True)
        ((x,), recv) = attach_recv([torch.ones(2)], RECEIVED, PEER)
        self.context.add_recv(recv)
        self.recv = recv
        self.product = (x if used else torch.ones(2)) * self.weight
        self.context.add_send(SendNode(SENT, PEER, [self.product]))
        self.context.participants.add(PEER)
        self.ended = self.service.answered

    def enter(self, number: int = 0, root: WorkerId = ROOT) -> Pass:
        entered, is_new = self.service.join(self.context, PassId(make_id(peer_id(root, 0), number)), root, False, ())
        assert is_new
        request: Any = None
        entered.answer_at_end(request)
        return entered


def gradient() -> list[Tensor]:
    return [torch.tensor([1.0, 10.0])]


def test_a_pass_is_over_when_all_is_heard_and_told() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.begin()
    assert part.ended == []
    assert pass_.waiting_for() == [f"worker '{PEER}' (message {SENT})"]
    pass_.hear_and_run(SENT, gradient())
    assert part.ended == [pass_]
    assert part.service.said[-1] == ("tell", PEER, RECEIVED, [[2.0, 30.0]])
    assert part.context.gradients[part.weight].tolist() == [1.0, 10.0]
    assert pass_.waiting_for() == []


def test_what_is_heard_before_the_start_counts() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.hear_and_run(SENT, gradient())
    assert part.service.said == []
    pass_.begin()
    assert part.ended == [pass_]


def test_nothing_leads_to_nothing() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.begin()
    pass_.hear_and_run(SENT, None)
    assert part.service.said[-1] == ("tell", PEER, RECEIVED, None)
    assert part.context.gradients == {}


def test_a_recv_that_nothing_reaches_speaks_first() -> None:
    part = Part(used=False)
    pass_ = part.enter()
    pass_.begin()
    assert part.service.said == [("tell", PEER, RECEIVED, None)]


def test_a_worker_that_a_waiting_recv_would_tell_is_invited() -> None:
    """It may be the one that Send waits for, and it does not know of the pass."""
    part = Part()
    part.enter().begin()
    assert part.service.said == [("invite", PEER)]


def test_a_worker_that_has_been_told_is_not_invited() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.hear_and_run(SENT, gradient())
    pass_.begin()
    assert [what for what, *_ in part.service.said] == ["tell"]


def test_gradients_must_fit() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.begin()
    check = part.service.check
    with pytest.raises(AutogradError, match="never sent"):
        check(part.context, LATER, PEER, gradient())
    with pytest.raises(AutogradError, match="went to worker '1'"):
        check(part.context, SENT, ROOT, gradient())
    with pytest.raises(GradientMismatch):
        check(part.context, SENT, PEER, [torch.ones(3)])
    check(part.context, SENT, PEER, gradient())
    pass_.hear_and_run(SENT, gradient())
    assert part.ended == [pass_]


def test_what_is_sent_later_is_no_part_of_the_pass() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.begin()
    part.context.add_send(SendNode(LATER, PEER, [part.product]))
    pass_.hear_and_run(LATER, None)
    with pytest.raises(AutogradError, match="was sent after the pass had begun"):
        pass_.hear_and_run(LATER, gradient())
    part.context.arrived(MessageId(9), PEER)
    assert part.service.said[-1] == ("too late", PEER, MessageId(9))
    pass_.hear_and_run(SENT, gradient())
    assert part.ended == [pass_]


def test_late_messages_are_answered_even_when_the_part_is_over() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.begin()
    pass_.hear_and_run(SENT, gradient())
    part.context.arrived(MessageId(9), PEER)
    assert part.service.said[-1] == ("too late", PEER, MessageId(9))


def test_sends_that_hear_from_nobody_hold_nothing_up() -> None:
    part = Part()
    part.context.unsent.add(SENT)
    pass_ = part.enter()
    pass_.begin()
    assert part.ended == [pass_]


def test_the_first_error_counts_and_everything_is_released() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.begin()
    first = ValueError("first")
    pass_.fail(first)
    pass_.fail(ValueError("second"))
    assert pass_.error is first
    assert part.ended == [pass_]
    pass_.hear_and_run(SENT, gradient())
    assert part.context.gradients == {}
    assert (pass_._early, pass_._unheard, pass_._graph) == ((), {}, None)
    assert "failed" in repr(pass_)


def test_an_error_of_a_backward_ends_the_pass() -> None:
    part = Part()

    def refuse(_: Tensor) -> None:
        raise ValueError("refused")

    part.product.register_hook(refuse)
    pass_ = part.enter()
    pass_.begin()
    pass_.hear_and_run(SENT, gradient())
    assert isinstance(pass_.error, ValueError)
    assert part.ended == [pass_]


def test_a_pass_given_up_before_its_start_does_not_start() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.fail(ValueError("too slow"))
    pass_.begin()
    assert part.service.said == []
    assert part.ended == [pass_]


def test_a_death_spoils_the_context_and_an_error_does_not() -> None:
    part = Part()
    part.enter(0).fail(ValueError("an error"))
    part.context.check_usable()
    part.enter(1).fail(WorkerDied("worker 'ps1' is gone.", worker="ps1"))
    assert part.context.failure is not None
    assert (str(part.context.failure), part.context.failure.worker) == ("worker 'ps1' is gone.", "ps1")


# --- several passes over one context ---


def test_the_next_pass_of_a_root_ends_the_one_before() -> None:
    part = Part()
    first = part.enter(0)
    first.begin()
    second = part.enter(1)
    assert isinstance(first.error, AutogradError)
    assert not second.finished


def test_what_comes_about_an_older_pass_begins_nothing() -> None:
    part = Part()
    part.enter(1).begin()
    with pytest.raises(AutogradError, match="is over: a later one began"):
        part.enter(0)


def test_passes_of_two_roots_do_not_overlap() -> None:
    part = Part()
    first = part.enter()
    first.begin()
    with pytest.raises(AutogradError, match="passes over one context run one after the other"):
        part.enter(root=PEER)
    first.hear_and_run(SENT, gradient())
    part.enter(root=PEER)


def test_the_end_of_a_context_ends_its_pass() -> None:
    part = Part()
    pass_ = part.enter()
    pass_.begin()
    part.service.registry.end(part.context.context_id)
    assert "ended while a backward pass over it was running" in str(pass_.error)
    assert part.service.passes() == []


def test_the_root_hears_its_roots_like_a_send() -> None:
    part = Part()
    pass_ = part.enter(root=HERE)
    loss = (part.product * 2).sum()
    part.context.sends.clear()
    pass_.begin(roots=Roots((get_gradient_edge(loss),), [torch.ones(())]))
    assert part.ended == [pass_]
    assert part.context.gradients[part.weight].tolist() == [2.0, 2.0]


# --- a graph that was walked over ahead ---


class TwoLeaves(Part):
    """A worker that answered with twice the sum of two leaves, and looked at its graph while it waited."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        total = self.one + self.other
        self.handed_on: list[int] = []  # where the gradient is that both leaves are given
        total.grad_fn.register_hook(lambda leaving, _: self.handed_on.append(leaving[0].data_ptr()))
        self.context.add_send(SendNode(SENT, PEER, [total * 2]))
        walk_ahead(self.context, SENT)
        assert self.context.ahead is not None

    def all_copied(self) -> bool:
        found = self.context.gradients
        assert len(self.handed_on) == 1
        return len({found[self.one].data_ptr(), found[self.other].data_ptr(), *self.handed_on}) == 3


@pytest.mark.parametrize("retain_graph", [False, True])
def test_leaves_have_no_gradient_in_common_if_the_graph_was_known_before(
    retain_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = TwoLeaves()
    monkeypatch.setattr(graph, "may_share", None)  # it is known
    part.service.join(part.context, PassId(0), ROOT, retain_graph, ())[0].begin((SENT, gradient()))
    found = part.context.gradients
    assert found[part.one].tolist() == found[part.other].tolist() == [2.0, 20.0]
    assert part.all_copied()


def test_nor_if_one_of_them_is_also_sent_by_itself() -> None:
    part = TwoLeaves()
    part.context.add_send(SendNode(LATER, PEER, [part.one]))
    pass_ = part.enter()
    pass_.begin((SENT, gradient()))
    pass_.hear_and_run(LATER, gradient())
    found = part.context.gradients
    assert found[part.one].tolist() == [3.0, 30.0] and found[part.other].tolist() == [2.0, 20.0]
    assert part.all_copied()


def test_nor_if_the_user_gives_one_another_shape_meanwhile() -> None:
    part = TwoLeaves()
    part.other.data = torch.ones(1)
    pass_ = part.enter()
    pass_.begin((SENT, gradient()))
    assert pass_.error is not None or part.all_copied()  # torch itself may refuse it
