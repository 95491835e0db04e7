"""A link carries this worker's requests and notices to one other worker, over one connection after the other.

What was sent is remembered until it is answered, and sent again over the next connection if the one it went over is
lost. A link ends with the worker: then everything that still waits is told so. How it connects is in `connecting.py`,
who reads the replies in `reply_reader.py`.
"""

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from telegrad import trace
from telegrad.cuda import order, reads
from telegrad.errors import CallCancelled, RpcTimeout, SerializationError, TelegradError
from telegrad.rpc.client.connecting import Connecting
from telegrad.rpc.client.function_table import FunctionTable
from telegrad.rpc.client.outcomes import LinkEvents
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.client.reply_reader import BURST_CALLS, ReplyReader
from telegrad.rpc.client.timeouts import NOT_CONNECTED, NOT_TAKEN, LateCalls, timeout_error
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.threads.delayed_flush import BURST, LAZY
from telegrad.rpc.threads.yield_turn import local
from telegrad.rpc.torch_modes import stand_in
from telegrad.rpc.workers import Member
from telegrad.transport.connection import SMALL_PAYLOAD, Connection
from telegrad.wire.codec import Packed
from telegrad.wire.frames import NOTICE, REQUEST, encode_whole
from telegrad.wire.messages import AnyMessage, CancelCall, Ping
from telegrad.wire.tensor.small import describe_small
from telegrad.wire.tensor.tensors import describe

log = logging.getLogger("telegrad.rpc")

NOTHING = Packed(b"", [])


class Link(Connecting):
    """Requests to one incarnation of one worker."""

    def __init__(self, runtime: Runtime, events: LinkEvents, member: Member, number: int) -> None:
        super().__init__(runtime, events, member, number)
        self._audit = runtime.layers.audit
        self.functions = FunctionTable(member.name)
        self.exhausted = (0.0, 0, 0)  # when the worker last said that what is asked waits, and why (`Exhausted`)
        self._late = LateCalls(self, self.completion.settle)
        self._notice_ids = itertools.count(1)
        self.replies = ReplyReader(self)
        self.wait = self.replies.wait  # bound: a caller waits where the replies are read
        self.poll = self.replies.poll
        self.expect = self.replies.arm  # have the I/O threads read what comes

    def __repr__(self) -> str:
        return f"<Link to {self.member.name!r}: {len(self.pending)} pending, {self.replies.state}>"

    @property
    def kept_notices(self) -> int:
        """How many notices would be sent again over a new connection: whether one arrived, nobody says."""
        return len(self._notices)

    # --- sending ---

    def send(
        self,
        message: AnyMessage,
        packed: Packed = NOTHING,
        *,
        timeout: float,
        what: str | Callable[[], str],
        complete: Callable[[Slot], None] | None = None,
        future: Any = None,
        on_reply: Any = None,
        definition: bytes = b"",
        attended: bool = False,
        prompt: bool = False,
    ) -> Slot:
        """Send a request; its slot is completed by `complete`, or waited for with `wait`, or both if `attended`.

        A `prompt` one, which others wait for, is held back to share a write only if this thread has more to serve,
        which is likely to send more of them.

        `definition` is that of the function the message calls by its number."""
        payload, tensors = packed.payload, packed.tensors
        specs: Any = ()
        memory: Any = b""
        if tensors:
            if order.active or self.member.device_maps:
                specs, memory = self.runtime.placement.describe(self.member, tensors)
            else:
                specs, memory = describe_small(tensors) or describe(tensors)
        now = time.monotonic()
        deadline = now + timeout if timeout else FOREVER
        resend = (message, payload, specs, memory)
        slot = Slot(
            what, timeout, deadline, self, now, resend, definition, complete, attended, future, on_reply, packed.kept
        )
        if future is not None:
            future.awaited = slot
        if order.active:
            slot.in_place = reads.asking(waits=complete is None)
        if trace.recorder is not None or self._audit is not None:
            self._record(slot, message, payload, specs, memory)
        connection = self.current or self._connection_for(slot)
        ack = self.pending.admit(slot)  # before sending: the reply may come first
        unattended = complete is not None and not attended
        hold = unattended and self._unwaited(slot, now, prompt)
        try:
            limit = deadline if timeout else None
            if type(memory) is bytes and len(payload) < SMALL_PAYLOAD:
                frame = encode_whole(REQUEST, slot.request_id, ack, message, payload, specs, memory)
                connection.send_encoded(frame, limit, hold)
            else:
                connection.send(
                    REQUEST,
                    slot.request_id,
                    ack,
                    message,
                    payload,
                    specs,
                    memory,
                    deadline=limit,
                    hold=hold,
                    in_place=slot.in_place,
                )
        except TimeoutError:
            self.pending.forget(slot.request_id)
            raise self.timeout_error(slot, NOT_TAKEN) from None
        except SerializationError:
            self.pending.take(slot.request_id)
            raise
        except (OSError, ValueError):  # ValueError: closed by another thread meanwhile
            self.lost(connection)
        if connection.closed:
            self._send_over_next(connection, REQUEST, slot.request_id, 0, *slot.whole())
            if self.dead is not None and self.pending.take(slot.request_id) is not None:
                raise self.died(slot) from None
        if hold:
            # Nor are replies read one by one then: completing a future lets go of the GIL, and each time the thread
            # that asks and the thread that reads would fight for it.
            self.replies.last_asked = now
            connection.flush_within(BURST)
        elif unattended:
            self.replies.arm()
        return slot

    def _unwaited(self, slot: Slot, now: float, prompt: bool) -> bool:
        """A request whose deadline no caller's own thread keeps. Whether it may wait a moment to be sent: in a burst of
        calls nobody waits for yet, small ones share a write, and the reader of replies sends them on."""
        if slot.deadline < self.pending.next_deadline:
            self.pending.next_deadline = slot.deadline
            self.runtime.timer.at(slot.deadline, self.expire)
        if prompt:
            turn = local.turn
            return turn is not None and len(self.pending.slots) > BURST_CALLS and turn.has_more
        self.runtime.reply_events.asked(now)
        return len(self.pending.slots) > BURST_CALLS

    def _record(self, slot: Slot, message: AnyMessage, payload: bytes, specs: Any, memory: Any) -> None:
        slot.watched = True
        if trace.recorder is not None:
            trace.recorder.asked(slot, message, payload, specs, memory)
        if self._audit is not None:
            self._audit.sent(self.member.name, message, payload, specs, slot.what())

    def _connection_for(self, slot: Slot) -> Connection:
        try:
            return self.connection(slot.deadline)
        except TimeoutError:
            raise self.timeout_error(slot, NOT_CONNECTED) from None

    def notify(self, message: AnyMessage, lazy: bool = False) -> None:
        """Send a notice: it has no reply, and a dead worker does not need it. A lazy one goes with the next message.

        The latest are kept, since nobody says which have arrived, and sent again over the next connection."""
        number = next(self._notice_ids)
        self._notices.append((number, message))
        try:
            connection = self.current or self.connection()
        except TelegradError:
            log.debug("a notice to %s was not delivered: %s", self.member.name, message)
            return
        try:
            frame = encode_whole(NOTICE, number, 0, message)
            connection.send_encoded(frame, time.monotonic() + self.runtime.patience, hold=True)
            if lazy:
                connection.flush_within(LAZY)
            else:
                connection.flush()
        except TimeoutError:
            log.debug("a notice to %s cannot be written now; it goes with the next message", self.member.name)
        except (OSError, ValueError):
            self.lost(connection)
        if connection.closed:
            self._send_over_next(connection, NOTICE, number, 0, message)

    def ping(self) -> None:
        """The timer: ask whether the worker lives."""
        self.mention(Ping())

    def mention(self, message: AnyMessage, within: float = 0.0) -> None:
        """Send a notice that need not arrive, without waiting."""
        connection = self.current
        if connection is not None:
            connection.mention(message, self.pending.lowest(), within)

    # --- deadlines, and signs of life ---

    def timeout_error(self, slot: Slot, where: str = "", *, ask: bool = False) -> RpcTimeout:
        """What a caller gets whose deadline passed. `ask` if the thread may wait a moment for what the worker says."""
        if trace.recorder is not None:
            trace.recorder.answered(slot)
        return timeout_error(self, slot, where, ask)

    def cancel(self, slot: Slot) -> bool:
        """The caller no longer wants the reply. False if it has it, or is about to."""
        if self.pending.give_up(slot.request_id) is None:
            return False
        self.mention(CancelCall(slot.request_id), BURST)
        slot.error = CallCancelled(f"{slot.what()} was cancelled")
        self.completion.settle([slot])
        return True

    def stopped_waiting(self, slot: Slot) -> None:
        """The caller waits no more: its deadline has passed, or it was interrupted."""
        if stand_in.in_force.cancels_at_timeout:
            self.mention(CancelCall(slot.request_id), BURST)

    def expire(self) -> None:
        """The timer: a deadline of a future may have passed."""
        late, again = self.pending.expired(time.monotonic())
        if late:
            self._late.add(late)
        if again != FOREVER:
            self.runtime.timer.at(again, self.expire)

    def last_sign(self) -> float:
        """When the worker was last heard, or took in more of what is being written to it."""
        connection = self.current
        return max(self.replies.receiver.last_heard, 0.0 if connection is None else connection.last_progress)

    def host_answers(self, seconds: float) -> bool:
        """Whether the worker's kernel confirmed a ping within `seconds`, though the worker itself says nothing."""
        connection = self.current
        return connection is not None and connection.peer_host_answers(seconds)

    def tidy(self, before: float) -> None:
        """Return memory that has been idle since `before`; the worker's own word on that is read by the I/O threads."""
        connection = self.current
        if connection is not None and connection.tidy(before):
            self.replies.arm()
