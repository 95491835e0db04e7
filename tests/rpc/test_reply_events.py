"""What comes over many links is read by one thread, and nothing that follows from it keeps others waiting."""

import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.rpc.threads import reply_events
from telegrad.rpc.threads.io_threads import IoThreads
from telegrad.rpc.threads.reply_events import ReplyEvents
from tests.waiting import wait_until


class Link:
    """One end of a socket whose bytes are answers."""

    def __init__(self, events: ReplyEvents) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self._events = events
        self.readers: list[int] = []  # threads that read
        self.completed: list[bytes] = []
        self.alone: list[bool] = []
        self.blocks: threading.Event | None = None
        self.fails = False
        self.fails_to_complete = False
        self.while_read: Callable[[], None] = lambda: None
        events.register(self.near.fileno(), self)

    def answer(self, text: bytes = b"x") -> None:
        self.far.send(text)

    def arm(self, alone: bool = False) -> None:
        self._events.arm(self.near.fileno(), alone)

    def gather(self) -> list[Any]:
        self.readers.append(threading.get_ident())
        if self.fails:
            raise RuntimeError("cannot be read")
        self.while_read()
        return [self.near.recv(100)]

    def complete(self, gathered: list[Any], alone: bool) -> None:
        if self.blocks is not None:
            assert self.blocks.wait(60)
        if self.fails_to_complete:
            raise RuntimeError("cannot be completed")
        self.alone.append(alone)
        self.completed += gathered

    def readable(self) -> None:
        self.complete(self.gather(), alone=True)

    def close(self) -> None:
        self._events.forget(self.near.fileno())
        self.near.close()
        self.far.close()


@pytest.fixture
def events() -> Iterator[ReplyEvents]:
    threads = IoThreads("test", 4)
    threads.start()
    made = ReplyEvents(threads)
    made.start()
    yield made
    threads.close()
    made.close()


@pytest.fixture
def threads(events: ReplyEvents) -> IoThreads:
    return events._io_threads


@pytest.fixture
def links(events: ReplyEvents) -> Iterator[list[Link]]:
    made = [Link(events) for _ in range(8)]
    yield made
    for link in made:
        link.close()


def test_answers_of_many_links_are_read_by_one_thread() -> None:
    threads = IoThreads("test", 4)
    threads.start()
    events = ReplyEvents(threads)
    links = [Link(events) for _ in range(8)]
    for link in links:
        link.answer()
        link.arm()
    events.start()  # only now: all of them have come when the first thread looks
    wait_until(lambda: all(link.completed for link in links))
    threads.close()
    for link in links:
        link.close()
    events.close()
    assert len({reader for link in links for reader in link.readers}) == 1
    assert not any(alone for link in links for alone in link.alone)


def test_who_asks_many_is_left_to_ask(monkeypatch: pytest.MonkeyPatch, events: ReplyEvents) -> None:
    """A thread that came for the first answer waits while requests follow each other, and no longer than a moment."""
    now, pauses = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now, pauses
        now += seconds
        pauses += 1
        if pauses < 5:
            events.asked(now)  # it goes on asking

    monkeypatch.setattr(reply_events, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    events.asked(now)
    events._let_ask()
    assert pauses == 0  # the one that is answered was the only one
    events.asked(now)
    events.asked(now)
    events._let_ask()
    assert 5 <= pauses < reply_events._MOST_PAUSES


def test_each_answer_is_read_when_its_link_is_armed(links: list[Link]) -> None:
    for number in range(20):
        for link in links:
            link.answer(b"%d" % number)
            link.arm()
        wait_until(lambda number=number: all(len(link.completed) == number + 1 for link in links))
    assert links[0].completed == [b"%d" % number for number in range(20)]


def _others_are_read_meanwhile(slow: Link, others: list[Link]) -> None:
    slow.answer()
    slow.arm()
    wait_until(lambda: bool(slow.readers))
    for link in others:
        link.answer()
        link.arm()
    wait_until(lambda: all(link.completed for link in others))


def test_what_follows_from_one_answer_keeps_no_other_link_waiting(links: list[Link]) -> None:
    slow, *others = links
    slow.blocks = threading.Event()
    _others_are_read_meanwhile(slow, others)
    assert not slow.completed
    slow.blocks.set()
    wait_until(lambda: bool(slow.completed))


def test_a_link_that_cannot_be_read_keeps_no_other_waiting(links: list[Link]) -> None:
    links[0].fails = True
    for link in links:
        link.answer()
        link.arm()
    wait_until(lambda: all(link.completed for link in links[1:]))


def test_a_link_may_have_a_thread_of_its_own(links: list[Link]) -> None:
    for number in range(3):  # and back: a large answer, then small ones
        for alone in (True, False):
            links[0].answer()
            links[0].arm(alone)
            wait_until(lambda number=number, alone=alone: len(links[0].completed) == 2 * number + (1 if alone else 2))


def test_the_end_of_a_link_is_seen_though_nothing_is_expected(links: list[Link]) -> None:
    links[3].far.close()
    wait_until(lambda: links[3].completed[:1] == [b""])


def test_a_link_can_be_nudged_from_the_start(threads: IoThreads, links: list[Link]) -> None:
    """The last part of a large answer may come over another descriptor before the link has had a thread of its own."""
    links[0].answer()
    threads.nudge(links[0].near.fileno())
    wait_until(lambda: links[0].completed == [b"x"])


def test_a_link_may_be_forgotten_as_it_is_armed(
    events: ReplyEvents, threads: IoThreads, links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads arms it, another finds that the connection has ended."""
    fd, epoll = links[0].near.fileno(), events._epoll

    class Overtaken:
        def modify(self, fd: int, mask: int) -> None:
            epoll.modify(fd, mask)
            events.forget(fd)

        def unregister(self, fd: int) -> None:
            epoll.unregister(fd)

    with monkeypatch.context() as patch:
        patch.setattr(events, "_epoll", Overtaken())
        links[0].arm(alone=True)
    assert fd not in threads._handlers  # or the next descriptor of that number would be taken for this one
    links[0].near.close()
    following = Link(events)
    following.answer()
    following.arm(alone=True)
    wait_until(lambda: following.completed == [b"x"])
    following.close()


def test_an_answer_that_leads_to_an_error_keeps_no_other_from_being_completed(
    events: ReplyEvents, links: list[Link]
) -> None:
    links[0].fails_to_complete = True
    for link in links:
        link.answer()
    for link in links:
        events.asked(now=1e12)  # so that all are read together
        link.arm()
    wait_until(lambda: all(link.completed for link in links[1:]))


def test_what_was_read_as_the_agent_ends_is_completed() -> None:
    threads = IoThreads("test", 4)
    events = ReplyEvents(threads)
    link = Link(events)
    link.while_read = events.close
    link.answer()
    link.arm()
    events._take()
    assert link.completed == [b"x"]
    link.near.close()
    link.far.close()
    threads.close()


def test_a_thread_that_reads_may_let_another_read_the_rest(events: ReplyEvents, links: list[Link]) -> None:
    """As it finds that a connection has ended: it may have to wait for the thread that dials again."""
    slow, *others = links
    dialled = threading.Event()

    def lose() -> None:
        events.others_may_read()
        assert dialled.wait(60)

    slow.while_read = lose
    _others_are_read_meanwhile(slow, others)
    dialled.set()
    wait_until(lambda: bool(slow.completed))
