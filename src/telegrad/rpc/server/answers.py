"""The answering half of a session: replies leave over its connection, and are kept until they have arrived.

Replies to requests that arrived together leave together. If the connection is lost meanwhile, the caller asks again
over the next one and is answered from memory.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from telegrad import trace
from telegrad.cuda import order
from telegrad.rpc.devices import Placement
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.at_most_once import MOST_KEPT, AtMostOnce, Reply
from telegrad.rpc.server.cancellation import Cancellations
from telegrad.rpc.threads.delayed_flush import LAZY
from telegrad.rpc.threads.yield_turn import Turn, local
from telegrad.rpc.workers import Member
from telegrad.transport.connection import SMALL_PAYLOAD, Connection
from telegrad.wire.frames import Frame, encode_whole
from telegrad.wire.messages import AnyMessage
from telegrad.wire.tensor.specs import TensorSpec

log = logging.getLogger("telegrad.rpc")

# Requests of one caller that are taken and not answered. Those that occupy a thread are limited by the pool; this
# bounds the others, coroutines and functions that return futures, and what they hold.
MOST_RUNNING = 4096
_LOOK_SECONDS = 0.001


class Answers:
    """What one caller's requests came to. The other half, which serves them, is `Session`."""

    def __init__(self, runtime: Runtime, member: Member) -> None:
        self._runtime = runtime
        self._layers = runtime.layers
        self.info, self.options = runtime.info, runtime.options
        self.plain, self.audit = runtime.layers.plain, runtime.layers.audit
        self.warnings = runtime.warnings
        self.member = member
        self.connection: Connection | None = None
        self._lock = threading.Lock()
        self._turn: Turn | None = None  # of the thread that serves
        self._inbox: deque[Frame] = deque()  # what came and is not yet served
        self.requests = AtMostOnce()
        self.cancellations: Cancellations | None = None  # made when it is first needed
        self.paused = False  # so much is running that no more is read

    @property
    def running(self) -> int:
        """Requests that were taken and not yet answered."""
        return len(self.requests.running)

    def under_way(self) -> list[str]:
        """What is being served or answered, in words; those who wait at a barrier are not served but waited for."""
        name = self.member.name
        is_work = self._layers.is_work
        return [f"a {kind.__name__} of worker {name!r}" for kind, _ in self.served() if is_work(kind)]

    @property
    def placement(self) -> Placement:
        """Where tensors go on other workers."""
        return self._runtime.placement

    def served(self) -> list[tuple[type, float]]:
        """The messages of the requests being served, and since when."""
        return list(self.requests.running.values())

    def reply(
        self,
        kind: int,
        request_id: int,
        message: AnyMessage,
        payload: bytes = b"",
        tensors: Sequence[TensorSpec] = (),
        memory: Any = b"",
        *,
        lazy: bool = False,
    ) -> None:
        """Answer a request: a message, and what goes with it. A lazy answer, one that nobody is waiting for, goes with
        the next one."""
        requests = self.requests
        reply: Any  # a `Reply`
        is_small = type(memory) is bytes and len(payload) < SMALL_PAYLOAD
        if is_small:
            reply = encode_whole(kind, request_id, 0, message, payload, tensors, memory)
        else:
            reply = (kind, request_id, message, payload, tensors, memory)
        requests.replies[request_id] = reply
        if trace.recorder is not None:
            trace.recorder.replied(self, request_id, kind, (message, payload, tensors, memory))
        connection = self.connection
        try:
            if is_small and connection is not None and not (lazy or self._inbox or self.plain):
                connection.send_encoded(reply)
            else:
                self._send(reply, lazy)
        except (OSError, ValueError):
            log.debug("a reply to %s waits for its next connection", self.member.name)
        finally:
            requests.running.pop(request_id, None)
            if self.paused:
                self._resume()
            if self.cancellations is not None:
                self.cancellations.forget(request_id)

    def cancelling(self) -> Cancellations:
        """What was cancelled of the requests here."""
        with self._lock:
            if self.cancellations is None:
                self.cancellations = Cancellations()
            return self.cancellations

    def cancel(self, request_ids: Iterable[int]) -> None:
        """The caller no longer waits for these requests, which run here or are still to be read."""
        cancellations = self.cancelling()
        for request_id in request_ids:
            if not self.requests.is_answered(request_id) and len(cancellations) < MOST_KEPT:
                cancellations.ask(request_id)
                if self.requests.is_answered(request_id):  # this very moment
                    cancellations.forget(request_id)

    def _send(self, reply: Reply, lazy: bool = False) -> None:
        """Send a frame, or what `Connection.send` takes of a large one, less the ack."""
        connection = self.connection
        if connection is None:
            return
        turn = local.turn if self._inbox else None
        if turn is not None and turn is self._turn:
            turn.owes = True  # it leaves with the replies of the requests behind it
        else:
            turn = None
        hold = lazy or turn is not None
        deadline = time.monotonic() + self.options.limits.patience if self.plain else None
        if type(reply) is bytes:
            connection.send_encoded(reply, deadline, hold)
        else:
            self._send_pieces(connection, deadline, hold, *reply)
        if turn is not None:
            if turn is not self._turn:  # it has ended since, and what it owed was written before this
                connection.flush()
        elif lazy:
            connection.flush_within(LAZY)

    def _send_pieces(
        self, connection: Connection, deadline: float | None, hold: bool, kind: int, request_id: int, *content: Any
    ) -> None:
        """What has large parts. If it turns out to be one frame, that is kept instead, so that no tensor outlives it; a
        larger one is acknowledged by the caller at once."""
        frame = connection.send(kind, request_id, 0, *content, deadline=deadline, hold=hold)
        if frame is not None and request_id in self.requests.replies:
            self.requests.replies[request_id] = frame

    def _send_again(self, reply: Reply) -> None:
        if order.active and type(reply) is not bytes:
            order.synchronize()  # this thread's streams are not those the result was made on
        try:
            self._send(reply)
        except (OSError, ValueError):
            log.debug("a reply to %s waits for its next connection", self.member.name)

    def _resume(self) -> None:
        """Go on reading if there is room again: the other half does."""
        raise NotImplementedError

    def tidy(self, before: float) -> None:
        """Return memory that has been idle since `before`."""
        connection = self.connection
        if connection is not None:
            connection.tidy(before)

    def mention(self, message: AnyMessage) -> None:
        """Tell the caller something about this worker, without waiting."""
        connection = self.connection
        if connection is not None:
            connection.mention(message)

    def deliver(self, deadline: float) -> None:
        """See to it that what was answered reaches the caller's host, if that takes it in before the deadline."""
        connection = self.connection
        if connection is None:
            return
        try:
            connection.flush()
            while not connection.closed and not connection.delivered and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                connection.flush()
        except (OSError, ValueError):
            log.debug("%s does not read its last answers", self.member.name)
