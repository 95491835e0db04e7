"""Lost connections: one thread dials a worker again, however many there were, and a few dial all workers."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.errors import WorkerDied
from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.outcomes import Unanswered
from telegrad.rpc.peers.heartbeat import Heartbeat
from telegrad.rpc.peers.liveness import Liveness
from telegrad.rpc.workers import Member
from tests.rpc.quiet import Events, quiet_runtime


class FakeLink:
    """A link whose dials do what the test says."""

    def __init__(self, *dials: Callable[["FakeLink"], None]) -> None:
        self.member = SimpleNamespace(name="worker1", host="another host", pid=1)
        self.connected, self.dead = False, None
        self.dials = list(dials)

    def resume(self, deadline: float) -> None:
        self.connected = True
        self.dials.pop(0)(self)


@pytest.fixture
def tasks() -> list[Callable[[], None]]:
    return []


@pytest.fixture
def heartbeat(tasks: list[Callable[[], None]]) -> Heartbeat:
    threads = SimpleNamespace(attend=tasks.append)
    runtime: Any = SimpleNamespace(closing=False, patience=3.0, io_threads=threads)
    liveness = Liveness(1.0, 3.0)
    peers: Any = SimpleNamespace(liveness_of=lambda member: liveness)
    return Heartbeat(runtime, None, None, peers)  # type: ignore[arg-type]


def nothing(link: FakeLink) -> None:
    pass


def test_one_thread_dials_for_all_that_were_lost(heartbeat: Heartbeat, tasks: list[Callable[[], None]]) -> None:
    """A party that closes one connection after the other would have a thread for each, until it is reached."""
    link: Any = FakeLink(nothing, nothing)
    for _ in range(64):
        heartbeat.link_lost(link)
    assert len(tasks) == 1
    tasks.pop()()
    assert len(link.dials) == 1 and not heartbeat._redialling
    link.connected = False
    heartbeat.link_lost(link)
    assert len(tasks) == 1


def test_one_that_is_lost_again_before_the_thread_ends_is_dialled_again(
    heartbeat: Heartbeat, tasks: list[Callable[[], None]]
) -> None:
    def lose(link: FakeLink) -> None:
        link.connected = False
        heartbeat.link_lost(link)  # type: ignore[arg-type]

    link: Any = FakeLink(lose, lose, nothing)
    heartbeat.link_lost(link)
    tasks.pop()()
    assert link.connected and not link.dials and not tasks and not heartbeat._redialling


def test_an_error_does_not_leave_it_without_anybody_who_dials(
    heartbeat: Heartbeat, tasks: list[Callable[[], None]]
) -> None:
    def fail(link: FakeLink) -> None:
        raise ZeroDivisionError

    link: Any = FakeLink(fail)
    heartbeat.link_lost(link)
    with pytest.raises(ZeroDivisionError):
        tasks.pop()()
    heartbeat.link_lost(link)
    assert len(tasks) == 1


def test_so_many_threads_dial_and_no_more(heartbeat: Heartbeat, tasks: list[Callable[[], None]]) -> None:
    """However many workers are lost at a time: the others are dialled in turn."""
    links: list[Any] = [FakeLink(nothing) for _ in range(200)]
    for link in links:
        heartbeat.link_lost(link)
    assert len(tasks) == 32
    tasks.pop()()
    assert all(link.connected for link in links)
    while tasks:
        tasks.pop()()  # find nothing left
    assert not heartbeat._redialling and not heartbeat._redial_threads
    heartbeat.link_lost(links[0])
    assert len(tasks) == 1


def test_one_that_does_not_answer_lets_others_go_first(
    heartbeat: Heartbeat, tasks: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_silent(link: FakeLink) -> None:
        link.connected = False
        order.append("silent")
        raise TimeoutError

    def answer(link: FakeLink) -> None:
        order.append("answers")

    order: list[str] = []
    monkeypatch.setattr("telegrad.rpc.peers.heartbeat._MOST_REDIAL_THREADS", 1)
    links: list[Any] = [FakeLink(be_silent, answer), FakeLink(answer)]
    for link in links:
        heartbeat.link_lost(link)
    tasks.pop()()
    assert order == ["silent", "answers", "answers"] and not tasks and not heartbeat._redialling


def test_an_error_leaves_nobody_behind_it_waiting(heartbeat: Heartbeat, tasks: list[Callable[[], None]]) -> None:
    def fail(link: FakeLink) -> None:
        raise ZeroDivisionError

    links: list[Any] = [FakeLink(fail), *(FakeLink(nothing) for _ in range(40))]
    for link in links:
        heartbeat.link_lost(link)
    first, *_ = tasks
    tasks.clear()
    with pytest.raises(ZeroDivisionError):
        first()
    assert len(tasks) == 1
    tasks.pop()()
    assert all(link.connected for link in links[1:])


class Asking(Events):
    """A worker does not answer, and what ended it is told when the test lets it be."""

    def __init__(self) -> None:
        self.asks, self.may_tell = threading.Event(), threading.Event()
        self.link = Link(quiet_runtime()[0], self, Member("other", WorkerId(1), Incarnation(2), (), 0), 1)

    def dial(self, link: Link, deadline: float) -> Unanswered:
        return Unanswered("Connection refused", gone=True)

    def unanswered(self, member: Member, why: str) -> None:
        self.asks.set()
        assert self.may_tell.wait(60)
        self.link.fail(WorkerDied("it ended by ValueError", worker="other", incarnation=2))


def test_whoever_hears_of_a_death_hears_what_ended_the_worker() -> None:
    """And finds that known everywhere: one thread asks, the others do not run ahead of it."""
    events = Asking()
    link = events.link
    heard: list[str] = []

    def use() -> None:
        with pytest.raises(WorkerDied) as caught:
            link.connection()
        heard.append(str(caught.value))

    threads = [threading.Thread(target=use) for _ in range(3)]
    threads[0].start()
    assert events.asks.wait(60)
    assert link.dead is not None  # nobody dials again
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.1)
    assert not heard
    events.may_tell.set()
    for thread in threads:
        thread.join(60)
    assert heard == ["it ended by ValueError"] * 3
