"""The end of a pass on its root: gradients come for leaves that nobody observes, and torch's engine is not needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad import trace
from telegrad.autograd.context import Context
from telegrad.autograd.functions import SendNode, attach_recv
from telegrad.cuda import lanes, order
from telegrad.engine.local.graph import Graph
from telegrad.engine.on_lane import RootPassOnLane
from telegrad.engine.passes import Roots
from telegrad.engine.root_pass import RootPass
from telegrad.ids import ContextId, make_id, peer_id
from telegrad.trace import Recorder
from tests.engine.test_passes import HERE, PEER, RECEIVED, SENT, Quiet


class Root:
    """A worker that sent the leaf `x`, and whose loss is the sum of what came back. It has told its peer so."""

    def __init__(self, leaf: Tensor | None = None, *others: Tensor) -> None:
        self.service = Quiet()
        self.service.agent.io_threads = SimpleNamespace(submit=lambda _: None)  # nobody is told of an error
        self.context = self.service.registry.join(ContextId(make_id(peer_id(HERE, 0), 0)))
        self.x = torch.ones(2, requires_grad=True) if leaf is None else leaf
        self.context.add_send(SendNode(SENT, PEER, [self.x, *others]))
        self.context.participants.add(PEER)
        self.pass_ = self.begin()

    def begin(self) -> RootPass:
        ((y,), recv) = attach_recv([torch.ones(2)], RECEIVED, PEER)
        self.context.recvs.clear()
        self.context.add_recv(recv)
        pass_ = self.service.open(self.context, False, 0.0)
        pass_.begin(roots=Roots([get_gradient_edge(y.sum())], [torch.ones(())]))
        return pass_

    def hear(self, *gradients: Tensor) -> None:
        self.pass_._look_at_leaves()
        self.pass_.hear_and_run(SENT, [*gradients])

    def released(self) -> bool:
        pass_ = self.pass_
        return (pass_._graph, pass_._unheard, pass_._at_leaves, pass_._running) == (None, {}, [], False)


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs whose last batch was run by torch's engine."""
    ran: list[Graph] = []
    run_last = Graph.run_last

    def run(graph: Graph, *roots: Any) -> None:
        ran.append(graph)
        run_last(graph, *roots)

    monkeypatch.setattr(Graph, "run_last", run)
    return ran


def with_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA tensors, but for the devices."""
    monkeypatch.setattr(order, "active", True)
    monkeypatch.setattr(order, "used", [])
    monkeypatch.setattr(lanes, "_local", lanes._Local())


def gradient() -> Tensor:
    return torch.tensor([1.0, 10.0])


def test_the_gradient_itself_is_kept_and_that_is_the_end(last: list[Graph]) -> None:
    root, came = Root(), gradient()
    root.hear(came)
    assert not last
    assert root.context.gradients[root.x] is came and root.x.grad is None
    assert root.pass_.done and root.pass_.finished and root.pass_.error is None and root.released()
    root.pass_.hear_and_run(SENT, None)  # as a notice that came late
    assert root.context.gradients[root.x] is came


def test_several_leaves_of_one_send(last: list[Graph]) -> None:
    root = Root(None, w := torch.ones(3, requires_grad=True))
    root.hear(gradient(), torch.full((3,), 5.0))
    assert not last
    assert root.context.gradients[root.x].tolist() == [1.0, 10.0] and root.context.gradients[w].tolist() == [5.0] * 3


@pytest.mark.parametrize(
    "observe",
    [
        lambda x, seen: x.register_hook(seen),
        lambda x, seen: x.register_post_accumulate_grad_hook(lambda leaf: seen(leaf.grad)),
        lambda x, seen: get_gradient_edge(x).node.register_prehook(lambda gradients: seen(gradients[0])),
    ],
)
def test_what_is_hooked_to_a_leaf_before_the_answer_still_fires(
    observe: Callable[[Tensor, Any], None], last: list[Graph]
) -> None:
    root = Root()
    seen: list[list[float]] = []
    observe(root.x, lambda gradient: seen.append(gradient.tolist()))
    root.hear(gradient())
    assert last and seen == [[1.0, 10.0]]
    assert root.context.gradients[root.x].tolist() == [1.0, 10.0]


@pytest.mark.parametrize("came", [torch.ones(1).expand(2), torch.ones(4)[::2]], ids=["expanded", "strided"])
def test_a_gradient_that_a_leaf_would_copy_is_copied(came: Tensor, last: list[Graph]) -> None:
    root = Root()
    root.hear(came)
    assert last and root.context.gradients[root.x].is_contiguous()
    assert root.context.gradients[root.x].tolist() == [1.0, 1.0]


def test_none_goes_the_usual_way(last: list[Graph]) -> None:
    root = Root()
    root.pass_._look_at_leaves()
    root.pass_.hear_and_run(SENT, None)
    assert root.pass_.done and root.context.gradients == {} and root.released()


def test_one_that_was_given_up_takes_nothing(last: list[Graph]) -> None:
    root = Root()
    root.pass_._look_at_leaves()
    root.pass_.fail(ValueError("too slow"))
    root.pass_.hear_and_run(SENT, [gradient()])
    assert not last and root.context.gradients == {} and not root.pass_.done and root.released()


def test_gradients_that_cannot_be_kept_end_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root()
    error = MemoryError("no room for a dict")

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Context, "accumulate", refuse)
    root.hear(gradient())
    assert root.pass_.error is error and root.pass_.over and not root.pass_.done and root.released()


def test_what_another_thread_runs_comes_first(last: list[Graph]) -> None:
    root = Root()
    root.pass_._running = True  # that thread will find it
    root.hear(gradient())
    assert not root.pass_.done and len(root.pass_._at_leaves) == 1
    root.pass_._running = False
    root.pass_.run()
    assert last and root.context.gradients[root.x].tolist() == [1.0, 10.0] and root.released()


def test_a_second_pass_adds_its_gradients_on_the_streams_of_the_pass(
    monkeypatch: pytest.MonkeyPatch, last: list[Graph]
) -> None:
    with_lanes(monkeypatch)
    ran_on: list[object] = []
    accumulate = Context.accumulate

    def noted(context: Context, gradients: Any) -> None:
        ran_on.append(lanes.current_lane())
        accumulate(context, gradients)

    monkeypatch.setattr(Context, "accumulate", noted)
    root = Root()
    root.hear(gradient())
    assert not last
    root.pass_ = root.begin()
    root.hear(gradient())
    assert last and root.context.gradients[root.x].tolist() == [2.0, 20.0]
    assert ran_on[1] is root.pass_.lane, "no other thread and no other stream adds"


def test_it_is_on_the_timeline_and_a_profile_has_the_engine(monkeypatch: pytest.MonkeyPatch, last: list[Graph]) -> None:
    recorder = Recorder(100)
    monkeypatch.setattr(trace, "recorder", recorder)
    root = Root()
    root.hear(gradient())
    assert not last and [event for event in recorder.drain() if "region (last)" in str(event)]
    profiled: list[object] = []
    root = Root()
    root.context.profile = Profile(profiled)
    root.hear(gradient())
    assert last and profiled and root.context.gradients[root.x].tolist() == [1.0, 10.0]


class Profile:
    def __init__(self, ran: list[object]) -> None:
        self.ran = ran

    def run(self, part: Callable[[], None]) -> None:
        self.ran.append(part)
        part()


def test_what_came_on_other_streams_is_handed_over_first(monkeypatch: pytest.MonkeyPatch, last: list[Graph]) -> None:
    handed: list[tuple[Any, Any]] = []
    with_lanes(monkeypatch)
    root = Root()
    assert type(root.pass_) is RootPassOnLane
    came = gradient()

    def hand_over(tensors: Any, lane: Any) -> None:
        assert root.context.gradients == {}
        handed.append(([*tensors], lane))

    monkeypatch.setattr(order, "hand_over", hand_over)
    root.hear(came)
    assert not last and root.context.gradients[root.x] is came
    assert len(handed) == 1 and handed[0][0][0] is came and handed[0][1] is root.pass_.lane


def test_a_root_that_was_done_gives_its_lane_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may fail after that, which ends the pass a second time."""
    with_lanes(monkeypatch)
    monkeypatch.setattr(lanes, "_lanes", [])
    monkeypatch.setattr(lanes, "_free", [])
    monkeypatch.setattr(lanes, "is_on_default", lambda: False)  # a stream of the user's own
    root = Root()
    assert root.pass_._taken is not None
    root.hear(gradient())
    root.pass_.fail(ValueError("a peer failed after that"))
    assert len(lanes._free) == 1
    assert lanes.take() is not lanes.take()
