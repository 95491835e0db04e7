"""The ends of contexts: each worker is told of each, once, and of several that end shortly after one another together."""

from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.engine import cleanup
from telegrad.engine.cleanup import EndedContexts
from telegrad.ids import ContextId, WorkerId
from telegrad.wire.messages import CleanupAutogradContext, CleanupAutogradContexts


def ended(number: int) -> CleanupAutogradContext:
    return CleanupAutogradContext(ContextId(number), (WorkerId(0),))


class Told:
    """Takes the agent's place: notes whom it would tell, and runs timed tasks when the test says that it is time."""

    def __init__(self, plain: bool = False) -> None:
        self.messages: list[tuple[int, Any]] = []
        self.timed: list[Any] = []
        self.layers = SimpleNamespace(plain=plain)
        self.timer = SimpleNamespace(at=lambda when, task: self.timed.append(task))
        self.io_threads = SimpleNamespace(submit=lambda task: task())
        self.contexts = EndedContexts(self)  # type: ignore[arg-type]

    def mention(self, worker: WorkerId, message: Any) -> None:
        self.messages.append((worker, message))

    def end(self, *numbers: int, workers: tuple[int, ...] = (1,)) -> None:
        for number in numbers:
            self.contexts.add(ended(number), [WorkerId(worker) for worker in workers])

    def time_passes(self) -> None:
        timed, self.timed = self.timed, []
        for task in timed:
            task()


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing depends on how fast the test runs."""
    monkeypatch.setattr(cleanup, "_SECONDS", 3600.0)


def test_one_context_is_told_at_once_and_those_after_it_together() -> None:
    told = Told()
    told.end(1)
    assert told.messages == [(1, ended(1))]
    told.end(2, 3)
    assert len(told.messages) == 1 and len(told.timed) == 1
    told.time_passes()
    assert told.messages[1:] == [(1, CleanupAutogradContexts((ended(2), ended(3))))]
    told.end(4)
    told.time_passes()
    assert told.messages[2:] == [(1, ended(4))]


def test_each_worker_is_told_of_its_own() -> None:
    told = Told()
    told.end(1)
    told.end(2, workers=(1, 2))
    told.end(3, workers=(2, 3))
    told.time_passes()
    assert dict(told.messages[1:]) == {1: ended(2), 2: CleanupAutogradContexts((ended(2), ended(3))), 3: ended(3)}


def test_many_do_not_wait_for_the_time_to_pass() -> None:
    told = Told()
    told.end(*range(1 + cleanup._MOST))
    assert [len(getattr(message, "contexts", "1")) for _, message in told.messages] == [1, cleanup._MOST]
    told.time_passes()
    assert len(told.messages) == 2


def test_when_time_has_passed_the_next_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "_SECONDS", 0.0)
    told = Told()
    told.end(1, 2, 3)
    assert told.messages == [(1, ended(1)), (1, ended(2)), (1, ended(3))] and not told.timed


def test_where_nobody_is_trusted_each_is_a_message_of_its_own() -> None:
    told = Told(plain=True)
    told.end(1, 2, 3)
    assert told.messages == [(1, ended(1)), (1, ended(2)), (1, ended(3))]
