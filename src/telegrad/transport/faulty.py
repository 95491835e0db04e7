"""Faults on purpose: a connection that breaks, refuses, loses or delays chosen messages, for tests of what follows.

`Faults` decides what happens to a message and counts; it is pure. `FaultyConnection` stands before a real connection
and does it. What is sent without a fault, and all that is received, passes through. The order stays: what is sent after
a delayed message waits behind it, as it would behind a slow network.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from telegrad.transport.connection import Connection
from telegrad.wire.frames import HEADER, NOTICE, WHOLE_BEGINS, decode_record
from telegrad.wire.messages import AnyMessage

log = logging.getLogger("telegrad.transport")


class Fault(Enum):
    """What can happen to a message."""

    BREAK = "break"  # the connection ends instead of sending it
    REFUSE = "refuse"  # it cannot be written in time, and its sender is told so
    LOSE = "lose"  # it is never sent, and nobody is told
    DELAY = "delay"  # it is sent some time later


class FaultPlan(msgspec.Struct, frozen=True):
    """A fault for one type of message: how often it happens (-1: always), and how long a delay takes."""

    fault: Fault
    times: int = -1
    seconds: float = 0.0


class Faults:
    """Plans by the name of the message's type. Counts are kept over all connections it is used for."""

    def __init__(self, plans: Mapping[str, FaultPlan]) -> None:
        self._plans = dict(plans)
        self._happened: dict[str, int] = {}
        self._lock = threading.Lock()

    def next_for(self, message: AnyMessage) -> FaultPlan | None:
        """What shall happen to this message; None if nothing shall. The plan counts as carried out."""
        name = type(message).__name__
        plan = self._plans.get(name)
        if plan is None:
            return None
        with self._lock:
            before = self._happened.get(name, 0)
            if 0 <= plan.times <= before:
                return None
            self._happened[name] = before + 1
        return plan

    def happened(self, name: str) -> int:
        """How often a fault happened to messages of this type."""
        return self._happened.get(name, 0)

    def on(self, connection: Connection) -> Connection:
        """A connection with these faults."""
        return FaultyConnection(connection, self)  # type: ignore[return-value] # it passes on all it does not do itself


class FaultyConnection:
    """Before a real connection, with which it shares every attribute that is not its own."""

    _OWN = ("_connection", "_faults", "_line", "_line_lock")

    def __init__(self, connection: Connection, faults: Faults) -> None:
        self._connection = connection
        self._faults = faults
        self._line: deque[tuple[float, tuple[Any, ...]]] = deque()  # what waits to be sent, and until when
        self._line_lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._connection, name, value)

    def send(
        self, kind: int, request_id: int, ack: int, message: AnyMessage, *args: Any, **kwargs: Any
    ) -> bytes | None:
        """As on a connection, unless a fault is due."""
        plan = self._faults.next_for(message)
        what = f"a {type(message).__name__}, on purpose"
        if plan is not None:
            log.debug("%s %s", plan.fault.value, what)
            if plan.fault is Fault.BREAK:
                raise ConnectionResetError(f"the connection broke before {what}")
            if plan.fault is Fault.REFUSE:
                raise TimeoutError(f"could not write {what}")
            if plan.fault is Fault.LOSE:
                return None
        with self._line_lock:
            if plan is not None or self._line:
                self._queue(plan.seconds if plan is not None else 0.0, (kind, request_id, ack, message, *args))
                return None
        return self._connection.send(kind, request_id, ack, message, *args, **kwargs)

    def send_encoded(self, frame: bytes, deadline: float | None = None, hold: bool = False) -> None:
        """The same for a frame that was encoded before."""
        if frame[: len(WHOLE_BEGINS)] == WHOLE_BEGINS:
            found = decode_record(memoryview(frame)[HEADER.size :])
            content = (found.payload, found.tensors, bytes(found.data or b""))
            self.send(found.kind, found.request_id, found.ack, found.message, *content, deadline=deadline, hold=hold)
        else:
            self._connection.send_encoded(frame, deadline, hold)

    def mention(self, message: AnyMessage, ack: int = 0, within: float = 0.0, payload: bytes = b"") -> None:
        """The same for a notice that need not arrive."""
        with contextlib.suppress(OSError):
            self.send(NOTICE, 0, ack, message, payload, hold=True)
            self._connection.flush()

    def _queue(self, seconds: float, frame: tuple[Any, ...]) -> None:
        self._line.append((time.monotonic() + seconds, frame))
        if len(self._line) == 1:
            threading.Thread(target=self._send_in_line, name="telegrad-faulty", daemon=True).start()

    def _send_in_line(self) -> None:
        while True:
            due, frame = self._line[0]
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                self._connection.send(*frame)
            except (OSError, ValueError) as error:
                log.debug("the connection was gone before a delayed message: %s", error)
            with self._line_lock:
                self._line.popleft()
                if not self._line:
                    return  # under the lock: whoever queues next starts another thread
