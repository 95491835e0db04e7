"""The ends of contexts: each worker is told of each, once; of those that end shortly after one another together."""

from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.autograd.context import Context
from telegrad.engine import cleanup
from telegrad.engine.cleanup import EndedContexts
from telegrad.ids import ContextId, WorkerId
from telegrad.wire.messages import CleanupAutogradContext, CleanupAutogradContexts

SECONDS = cleanup._SECONDS
LONG = SECONDS + cleanup._LAST_SECONDS + 0.001


def ended(number: int, workers: tuple[int, ...] = (1,)) -> CleanupAutogradContext:
    return CleanupAutogradContext(ContextId(number), named(workers))


def several(*numbers: int, workers: tuple[int, ...] = (1,)) -> CleanupAutogradContexts:
    return CleanupAutogradContexts(tuple(map(ContextId, numbers)), named(workers))


def named(workers: tuple[int, ...]) -> tuple[WorkerId, ...]:
    return (*map(WorkerId, workers), WorkerId(0))


class Told:
    """Takes the agent's place, and the clock's: notes whom it would tell, and runs timed tasks at their time."""

    def __init__(self, patch: pytest.MonkeyPatch, plain: bool = False) -> None:
        self.now = 100.0
        self.closing = False
        self.member = SimpleNamespace(worker_id=WorkerId(0))
        patch.setattr(cleanup, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.messages: list[tuple[int, Any]] = []
        self.timed: list[tuple[float, Any]] = []
        self.layers = SimpleNamespace(plain=plain)
        self.timer = SimpleNamespace(at=lambda when, task: self.timed.append((when, task)))
        self.io_threads = SimpleNamespace(submit=lambda task: task())
        self.contexts = EndedContexts(self)  # type: ignore[arg-type]

    def mention(self, worker: WorkerId, message: Any) -> None:
        self.messages.append((worker, message))

    def end(self, *numbers: int, workers: tuple[int, ...] = (1,)) -> None:
        for number in numbers:
            context = Context(ContextId(number), WorkerId(0), participants=set(map(WorkerId, workers)))
            self.contexts.add(context, ())

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = [task for when, task in self.timed if when <= self.now]
        self.timed = [(when, task) for when, task in self.timed if when > self.now]
        for task in due:
            task()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_one_context_is_told_at_once_and_those_after_it_together(told: Told) -> None:
    told.end(1)
    assert told.messages == [(1, ended(1))]
    told.end(2, 3)
    assert len(told.messages) == 1 and len(told.timed) == 1
    told.time_passes(LONG)
    assert told.messages[1:] == [(1, several(2, 3))]
    told.end(4)
    told.time_passes(LONG)
    assert told.messages[2:] == [(1, ended(4))]
    told.time_passes(LONG)
    assert len(told.messages) == 3 and not told.timed


def test_each_worker_is_told_of_its_own(told: Told) -> None:
    told.end(1)
    told.end(2, 3, workers=(1, 2))
    told.end(4, workers=(2,))
    told.time_passes(LONG)
    both = several(2, 3, workers=(1, 2))
    assert told.messages[1:] == [(1, both), (2, both), (2, ended(4, workers=(2,)))]


def test_those_who_have_been_told_are_not_told_again(told: Told) -> None:
    told.contexts.add(Context(ContextId(1), WorkerId(0), participants={WorkerId(1), WorkerId(2)}), (WorkerId(2),))
    assert told.messages == [(1, CleanupAutogradContext(ContextId(1), (WorkerId(2), WorkerId(1), WorkerId(0))))]


def test_many_do_not_wait_for_the_time_to_pass(told: Told) -> None:
    told.end(*range(1 + cleanup._MOST))
    assert [len(getattr(message, "contexts", "1")) for _, message in told.messages] == [1, cleanup._MOST]
    told.time_passes(LONG)
    assert len(told.messages) == 2


def test_while_contexts_go_on_ending_the_timer_tells_nobody(told: Told) -> None:
    """To wake a thread for it costs more than to tell with the next that ends."""
    submitted: list[Any] = []
    told.io_threads.submit = submitted.append
    for number in range(40):
        told.end(number)
        told.time_passes(0.4 * SECONDS)
        assert len(told.timed) <= 1
    assert not submitted
    told.time_passes(LONG)
    told.time_passes(LONG)
    assert len(submitted) <= 1 and not told.timed
    for tell in submitted:
        tell()
    contexts = [
        one for _, message in told.messages for one in getattr(message, "contexts", None) or (message.context_id,)
    ]
    assert contexts == [*range(40)] and len(told.messages) < 20


def test_two_who_look_at_once_do_not_look_for_ever(told: Told) -> None:
    told.end(1, 2)
    told.contexts._look_after(told.now)  # as if another thread had added one at the same moment
    told.time_passes(2 * LONG)
    assert told.messages[1:] == [(1, ended(2))] and not told.timed


def test_when_time_has_passed_the_next_is_told_at_once(told: Told) -> None:
    for number in (1, 2, 3):
        told.end(number)
        told.time_passes(SECONDS)
    assert told.messages == [(1, ended(1)), (1, ended(2)), (1, ended(3))] and not told.timed


def test_where_nobody_is_trusted_each_is_a_message_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, plain=True)
    told.end(1, 2)
    assert told.messages == [(1, ended(1)), (1, ended(2))]
    other = Context(ContextId(3), WorkerId(0), participants={WorkerId(1)})
    told.contexts._untold.append((other, ()))  # as if another thread had ended one at the same moment
    told.end(4)
    assert told.messages[2:] == [(1, ended(3)), (1, ended(4))]
