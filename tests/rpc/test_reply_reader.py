"""Who reads replies, and that somebody does."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.client import reply_reader
from telegrad.rpc.client.completion import wake
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.threads.delayed_flush import LAZY
from telegrad.rpc.workers import Member
from telegrad.wire.frames import REPLY
from telegrad.wire.messages import Ack, Goodbye
from tests.rpc.quiet import Events, QuietStream, quiet_runtime

MEMBER = Member("other", WorkerId(1), Incarnation(2), (), 0)


@pytest.mark.parametrize("sleepers", [1, 3])
def test_a_reply_is_read_by_another_as_its_caller_is_woken_to_read(
    monkeypatch: pytest.MonkeyPatch, sleepers: int
) -> None:
    """Woken twice, and by each other where several wait for one future: all go on."""
    link = Link(quiet_runtime()[0], Events(), MEMBER, 1)
    replies, slot = link.replies, Slot("a call", 0.0, FOREVER, link)
    acquire = reply_reader._acquire
    first = threading.Event()

    def wake_late(lock: Any, seconds: float) -> bool:
        woken = acquire(lock, seconds)
        if not first.is_set():  # it was to read; now another thread is first, and announces the reply
            first.set()
            slot.done = True
            wake(slot)
        return woken

    monkeypatch.setattr(reply_reader, "_acquire", wake_late)
    with replies._lock:
        for _ in range(sleepers):
            assert replies._queue(slot)
    threads = [threading.Thread(target=replies._sleep_until_woken, args=(slot, FOREVER)) for _ in range(sleepers)]
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    for thread in threads:
        thread.start()
    with replies._lock:
        replies._pass_on()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)


def link_with(**connection: Any) -> tuple[Link, Any]:
    """A link whose connection has what is given."""
    link = Link(quiet_runtime()[0], Events(), MEMBER, 1)
    stream = QuietStream(1, lambda: True)
    given = {"stream": stream, "closed": False, "reserved": 0, "outbox": (), "flush_within": lambda seconds: None}
    link.current = made = SimpleNamespace(**{**given, **connection})  # type: ignore[assignment]
    return link, made


def test_a_large_answer_is_read_to_its_end_only_by_a_thread_of_its_own() -> None:
    """It may come as fast as it is read, and other links would wait behind it."""
    pieces: list[int] = []

    def receive() -> list[Any]:
        pieces.append(1)
        connection.closed = len(pieces) >= 100
        return []

    link, connection = link_with(reserved=2**30, receive=receive)
    link.replies.gather()
    assert len(pieces) == 1
    link.replies.readable()
    assert len(pieces) == 100


def test_what_a_burst_has_postponed_is_read_though_callers_were_to_come_for_it() -> None:
    """A request of a backward pass counts as one whose caller comes, but only the I/O threads do."""
    link, _ = link_with()
    replies = link.replies
    for _ in range(reply_reader.BURST_CALLS + 1):
        link.pending.admit(Slot("a message of a pass", 0.0, FOREVER, link, complete=lambda _: None, attended=True))
    replies.last_asked = time.monotonic() + 60  # calls were held back a moment ago
    with replies._lock:
        replies._pass_on()
    assert replies.state == reply_reader.IDLE
    replies.arm_if_awaited()  # the delayed flush: the burst is over
    assert replies.state == reply_reader.ARMED


def test_an_acknowledgement_does_not_wait_for_a_peer_that_does_not_read() -> None:
    """The thread that reads sends it. Were it to wait, the answers of all links would."""
    mentioned: list[Any] = []

    def mention(message: Any, *rest: Any) -> None:
        mentioned.append(message)

    link, connection = link_with(mention=mention)  # with nothing that can wait
    link.replies.receiver.acknowledge(connection)
    assert mentioned == [Ack()]


def test_large_replies_are_acknowledged_together_when_the_delayed_flush_looks() -> None:
    """Usually the next request says so much sooner, and one that was encoded for each reply would be in its way."""
    mentioned: list[Any] = []
    asked: list[float] = []
    numbers = iter(range(1, 4))

    def receive() -> list[Any]:
        return [SimpleNamespace(kind=REPLY, is_large=True, request_id=next(numbers), message=None)]

    def mention(message: Any, ack: int, within: float, payload: bytes) -> None:
        mentioned.append((message, within))

    link, connection = link_with(receive=receive, mention=mention, flush_within=asked.append)
    receiver = link.replies.receiver
    receiver.attach(connection)
    for _ in range(2):
        receiver.receive(connection, [])
    assert asked == [LAZY] and not mentioned
    connection.before_flush()
    assert mentioned == [(Ack(), 0.0)] and not receiver.unacknowledged
    connection.before_flush()
    assert len(mentioned) == 1
    receiver.receive(connection, [])
    connection.closed = True
    connection.before_flush()
    assert len(mentioned) == 1
    receiver.attach(connection)  # the next connection: what was owed on the one before still is
    assert asked == [LAZY] * 3


def _ended(link: Link) -> None:
    link.replies.receiver.receive(link.current, [])  # type: ignore[arg-type]


def _goodbye(link: Link) -> None:
    link.replies.receiver._hear(Goodbye(Incarnation(2), ""))


@pytest.mark.parametrize("notice", [_ended, _goodbye])
def test_answers_of_others_are_read_while_the_end_of_one_worker_is_dealt_with(
    notice: Callable[[Link], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever notices may have to wait, for a thread that dials or for one that is told: meanwhile another reads."""
    link, _ = link_with(receive=lambda: None)
    told: list[str] = []
    monkeypatch.setattr(link.runtime.reply_events, "others_may_read", lambda: told.append("others may read"))
    monkeypatch.setattr(link, "lost", lambda connection: told.append("the end"))
    monkeypatch.setattr(link, "said_goodbye", lambda ending: told.append("the end"))
    notice(link)
    assert told == ["others may read", "the end"]
