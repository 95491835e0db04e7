"""Faults on purpose: what is decided, and what a connection then does. The real connection is a list."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.transport import faulty as faulty_module
from telegrad.transport.faulty import Fault, FaultPlan, Faults, FaultyConnection
from telegrad.wire.frames import FrameKind
from telegrad.wire.messages import Ack, Ping
from tests.waiting import wait_until


class Recorder:
    """Stands for a connection: notes what is sent, and tells when there is enough of it."""

    def __init__(self, enough: int = 1) -> None:
        self.sent: list[str] = []
        self.closed = False
        self._enough = enough
        self.all_sent = threading.Event()

    def send(self, kind: FrameKind, request_id: int, ack: int, message: Any, *_: Any, **__: Any) -> bytes:
        self.sent.append(f"{type(message).__name__} {request_id}")
        if len(self.sent) == self._enough:
            self.all_sent.set()
        return b"frame"


def faulty(recorder: Recorder, **plans: FaultPlan) -> Any:
    return FaultyConnection(recorder, Faults(plans))


def test_plans_are_counted_over_all_connections() -> None:
    faults = Faults({"Ping": FaultPlan(Fault.LOSE, times=2)})
    assert [faults.next_for(Ping()) is not None for _ in range(4)] == [True, True, False, False]
    assert faults.next_for(Ack()) is None
    assert (faults.happened("Ping"), faults.happened("Ack")) == (2, 0)


def test_a_plan_without_end_goes_on() -> None:
    faults = Faults({"Ping": FaultPlan(Fault.LOSE)})
    assert all(faults.next_for(Ping()) for _ in range(100))


@pytest.mark.parametrize(("fault", "error"), [(Fault.BREAK, ConnectionError), (Fault.REFUSE, TimeoutError)])
def test_some_faults_are_told_to_the_sender(fault: Fault, error: type[Exception]) -> None:
    recorder = Recorder()
    connection = faulty(recorder, Ping=FaultPlan(fault, times=1))
    with pytest.raises(error, match="Ping"):
        connection.send(FrameKind.NOTICE, 1, 0, Ping())
    assert connection.send(FrameKind.NOTICE, 2, 0, Ping()) == b"frame"
    assert recorder.sent == ["Ping 2"]


def test_a_lost_message_is_not_sent_and_others_are() -> None:
    recorder = Recorder()
    connection = faulty(recorder, Ping=FaultPlan(Fault.LOSE))
    assert connection.send(FrameKind.NOTICE, 1, 0, Ping()) is None
    connection.send(FrameKind.NOTICE, 2, 0, Ack())
    assert recorder.sent == ["Ack 2"]


def test_what_is_sent_after_a_delayed_message_stays_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    over = threading.Event()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert over.wait(60)

    monkeypatch.setattr(faulty_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    recorder = Recorder(enough=3)
    connection = faulty(recorder, Ping=FaultPlan(Fault.DELAY, seconds=1000.0))
    connection.send(FrameKind.NOTICE, 1, 0, Ping())
    connection.send(FrameKind.NOTICE, 2, 0, Ack())
    connection.send(FrameKind.NOTICE, 3, 0, Ping())
    wait_until(lambda: slept)
    assert recorder.sent == []
    assert 800 < slept[0] <= 1000
    over.set()
    assert recorder.all_sent.wait(60)
    assert recorder.sent == ["Ping 1", "Ack 2", "Ping 3"]


def test_all_else_is_the_real_connections() -> None:
    recorder = Recorder()
    connection = faulty(recorder)
    connection.closed = True
    assert recorder.closed and connection.closed
