"""Who reads replies: a caller that is woken to read may find that another thread has read its reply."""

import threading
from typing import Any

import pytest

from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.client import reply_reader
from telegrad.rpc.client.completion import wake
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.workers import Member
from tests.rpc.quiet import Events, quiet_runtime

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
