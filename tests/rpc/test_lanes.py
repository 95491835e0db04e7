"""Which requests have streams of their own on the GPU, and whose work these wait for; with stand-ins for streams.

`tests/cuda/test_order.py` has the same on a real one."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad.cuda import lanes, order
from telegrad.engine.on_lane import PassOnLane
from telegrad.engine.passes import Pass
from telegrad.ids import ContextId, Incarnation, WorkerId
from telegrad.rpc.request import Request
from telegrad.rpc.server import session as sessions
from telegrad.rpc.server.session import Session
from telegrad.rpc.workers import Member
from telegrad.wire.frames import Frame, FrameKind
from telegrad.wire.messages import Ack, AnyMessage, BeginPass, CleanupAutogradContext
from tests.rpc.quiet import Events, quiet_runtime, serve_with


def test_a_notice_that_frees_memory_takes_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[type, bool]] = []
    on_lane: list[bool] = []

    def serve(request: Request) -> None:
        served.append((type(request.message), bool(on_lane)))

    def run_on_lane(handler: Any, request: Request, _: int) -> None:
        on_lane.append(True)
        handler(request)
        on_lane.pop()

    monkeypatch.setattr(order, "active", True)
    monkeypatch.setattr(sessions.reads, "run_on_lane", run_on_lane)
    shared, quiet = quiet_runtime()
    serve_with(quiet, serve, BeginPass)
    serve_with(quiet, serve, CleanupAutogradContext, deferrable=True)
    session = Session(shared, Events(), Member("caller", WorkerId(1), Incarnation(1), (), 0), False)
    messages: list[AnyMessage] = [BeginPass(1, 2, WorkerId(1), False, ()), CleanupAutogradContext(ContextId(1), ())]
    for message in messages:
        session.serve(Request(session, Frame(FrameKind.NOTICE, 1, 0, message)))
    assert served == [(BeginPass, True), (CleanupAutogradContext, False)]


class Stream:
    """Notes what it waits for."""

    def __init__(self, device: int, handle: int) -> None:
        self.device_index, self.stream_id, self.cuda_stream, self.device_type = device, handle, handle, 1
        self.busy = False
        self.waits: list[Stream] = []

    def query(self) -> bool:
        return not self.busy

    def wait_event(self, event: "Event") -> None:
        self.waits.append(event.of)


class Event:
    """Of the stream that it was recorded on last."""

    of: Stream

    def record(self, stream: Stream) -> None:
        self.of = stream

    def query(self) -> bool:
        return not self.of.busy


def without_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    for module, name, value in (
        *((order, "used", []), (order, "active", False), (order, "_local", order._Local())),
        *((lanes, "_lanes", []), (lanes, "_free", []), (lanes, "_local", lanes._Local())),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Has a device come into use, on a machine that has none."""
    handles = iter(range(100, 200))
    current: dict[int, tuple[int, int, int]] = {}
    devices = [0]  # the current one last

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        current[device_index] = stream_id, device_index, device_type
        devices.append(device_index)  # as torch's does

    stand_in = SimpleNamespace(
        Stream=lambda device: Stream(device, next(handles)),
        Event=Event,
        default_stream=lambda device: Stream(device, 0),
        set_device=devices.append,
    )
    calls = SimpleNamespace(_cuda_getDevice=lambda: devices[-1], _cuda_setStream=set_stream)
    for module in (lanes, order):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=stand_in, _C=calls, autograd=torch.autograd))
    monkeypatch.setattr(lanes, "_current_raw", lambda device: current.get(device, (0, device, 1)))
    monkeypatch.setattr(order, "current_stream", lambda device: current.get(device, (0, device, 1))[0])
    without_lanes(monkeypatch)
    order.default_stream.cache_clear()
    yield order.use
    order.default_stream.cache_clear()


def test_who_knows_of_an_answer_finds_its_work_though_another_works_on_its_streams(use: Callable[[int], None]) -> None:
    use(0)
    first = lanes.take()
    first.stream(0).busy = True
    lanes.give_back(first)
    second = lanes.take()
    assert second is first, "the lane that was used last"
    third = lanes.take()
    assert third.stream(0).waits == [first.stream(0)]
    lanes.give_back(third)
    lanes.give_back(second)


def test_the_current_device_stays_whichever_is_in_use(use: Callable[[int], None]) -> None:
    use(1)
    lane = lanes.take()
    with lanes.on(lane):
        assert order.current_stream(1) == lane.stream(1).stream_id and lanes.torch._C._cuda_getDevice() == 0
    assert lanes.torch._C._cuda_getDevice() == 0
    lanes.give_back(lane)


def test_who_comes_at_the_same_time_does_not_wait(use: Callable[[int], None]) -> None:
    use(0)
    first, second = lanes.take(), lanes.take()
    first.stream(0).busy = True
    third = lanes.take()
    assert not second.stream(0).waits and not third.stream(0).waits


def test_the_default_streams_are_those_of_a_device_that_comes_later_too(use: Callable[[int], None]) -> None:
    use(0)
    lane = lanes.default_lane()
    with lanes.on(lane):
        thread = threading.Thread(target=use, args=(1,))
        thread.start()
        thread.join()
        with lanes.staying_on(lane):
            pass
    lane = lanes.default_lane()
    with lanes.on(lane):
        assert order.current_stream(1) == 0
    assert lane.handles == {0: 0, 1: 0}


@pytest.mark.parametrize("before", [[], [0], [0, 1]])
def test_a_device_may_come_into_use_while_a_thread_is_on_a_lane(use: Callable[[int], None], before: list[int]) -> None:
    for device in before:
        use(device)
    lane = lanes.take()
    with lanes.on(lane):
        use(2)
        with lanes.on(lane):
            assert [order.current_stream(device) for device in (*before, 2)] == [*lane.handles.values()]
        assert order.current_stream(2) == 0
        assert [order.current_stream(device) for device in before] == [lane.handles[device] for device in before]
    assert [order.current_stream(device) for device in (*before, 2)] == [0] * (len(before) + 1)


def test_a_torch_without_cuda_has_lanes_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other workers of its job may have GPUs."""
    without_lanes(monkeypatch)
    monkeypatch.setattr(order, "active", True)
    for lane in (lanes.take(), lanes.default_lane()):
        with lanes.on(lane), lanes.staying_on(lane):
            assert lanes.current_lane() is lane
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        with pytest.raises(RuntimeError, match="cuda:0 has no streams"):
            order.current_stream(0)


def test_a_pass_on_the_default_streams_leaves_nothing_to_be_waited_for(use: Callable[[int], None]) -> None:
    use(0)
    lane = lanes.default_lane()
    lanes.end(lane)
    lanes.join()
    assert not lanes._lanes and not lane.ended


def test_what_ended_on_a_lane_is_joined(use: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    use(0)
    ours = Stream(0, 50)
    monkeypatch.setattr(lanes.torch.cuda, "current_stream", lambda _: ours, raising=False)
    lanes.join()
    assert not ours.waits
    lane = lanes.take()
    lane.stream(0).busy = True
    lanes.join()
    assert not ours.waits, "it has not been answered"
    lanes.end(lane)
    lanes.join()
    assert ours.waits == [lane.stream(0)]


class NotedPass(Pass):
    """Notes the lane that the parts of it run on, and whether that has ended when it is answered."""

    service: Any
    context = None  # type: ignore[assignment] # it has none

    def __init__(self, *to_answer: Request) -> None:
        self.ran_on: list[Any] = []
        self._to_answer, self._for_root = to_answer, []
        self._lock = threading.Lock()
        self.service = self

    def answer(self, request: Any, ended: Pass, carried: Any) -> None:
        request.reply(Ack())

    def begin(self, heard: Any = None, roots: Any = None) -> None:
        self._run(None, None)  # type: ignore[arg-type] # as a pass does when it has made its graph

    def _run(self, graph: Any, taken: Any) -> None:
        self.ran_on.append((lanes.current_lane(), order.current_stream(0)))


class NotedOnLane(PassOnLane, NotedPass):
    """The same on a lane."""


@pytest.mark.parametrize("within", [True, False], ids=["in a request", "elsewhere"])
def test_all_that_a_pass_runs_is_on_its_lane(use: Callable[[int], None], within: bool) -> None:
    use(0)
    if within:
        lane = lanes.take()
        with lanes.on(lane):
            pass_ = NotedOnLane()
            pass_.begin()
    else:
        pass_ = NotedOnLane()
        lane = pass_.lane
        pass_.begin()
    assert pass_.ran_on == [(lane, lane.handles[0])]
    assert lanes.current_lane() is None and order.current_stream(0) == 0


@pytest.mark.parametrize("where", ["its own lane", "another", "none"])
def test_others_follow_a_pass_before_its_answer_leaves(use: Callable[[int], None], where: str) -> None:
    use(0)
    shared, _ = quiet_runtime()
    session: Any = Session(shared, Events(), Member("caller", WorkerId(1), Incarnation(1), (), 0), False)
    answered: list[bool] = []
    session.reply = lambda *_, **__: answered.append(pass_.lane.ended and pass_.lane.unfinished)
    request = Request(session, Frame(FrameKind.REQUEST, 1, 0, BeginPass(1, 2, WorkerId(1), False, ())))
    lane = lanes.take()
    lane.stream(0).busy = True
    with lanes.on(lane):
        pass_ = NotedOnLane(request)
        if where == "its own lane":
            pass_._end()
    if where == "another":
        with lanes.on(lanes.take()):
            pass_._end()
    elif where == "none":
        lanes.torch.cuda.current_stream = order.default_stream
        pass_._end()
    assert pass_.lane is lane and answered == [True]


def test_one_that_answers_nobody_ends_its_lane(use: Callable[[int], None]) -> None:
    use(0)
    with lanes.on(lanes.take()):
        pass_ = NotedOnLane()
        pass_._end()
        assert pass_.lane.ended
