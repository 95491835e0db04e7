"""What comes over a link: replies find the slots that wait for them, and their sender is told that they arrived."""

import array
import logging
import time
from functools import partial
from typing import Protocol

from telegrad.errors import CallRefused, ProtocolError, TelegradError
from telegrad.rpc.client.completion import Completion
from telegrad.rpc.client.pending import Pending, Slot
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.threads.delayed_flush import LAZY
from telegrad.rpc.workers import Member
from telegrad.transport.connection import Connection
from telegrad.wire.codec import is_modest
from telegrad.wire.frames import FAILURE, NOTICE, Frame
from telegrad.wire.messages import Ack, AnyMessage, ExceptionReply, Exhausted, Goodbye
from telegrad.wire.tensor.specs import written_out

log = logging.getLogger("telegrad.rpc")

_MOST_UNACKNOWLEDGED = 256  # replies that the worker may have to remember for a caller that asks nothing more


class ReceivingLink(Protocol):
    """The link that something comes over."""

    runtime: Runtime
    member: Member
    pending: Pending
    completion: Completion
    exhausted: tuple[float, int, int]

    def lost(self, connection: Connection) -> None:
        """The connection ended."""

    def break_off(self, connection: Connection, error: TelegradError) -> None:
        """The worker sends nonsense."""

    def said_goodbye(self, ending: str) -> None:
        """The worker leaves on purpose."""


class Receiver:
    """Takes in the frames of one link. One thread at a time, the one that reads; what it owes the worker, the timer may
    say as well."""

    def __init__(self, link: ReceivingLink) -> None:
        self._link = link
        self._runtime = link.runtime
        self._pending = link.pending
        self._slots = link.pending.slots
        self._announce = link.completion.announce
        self._audit = link.runtime.layers.audit
        # What a reply may be when it is written out, from one that is not trusted; 0 without a limit.
        self._most = link.runtime.options.max_message_bytes if link.runtime.layers.plain else 0
        self.last_heard = 0.0
        self._received: list[int] = []  # replies since the last acknowledgement
        self._owes = False  # whether one is due, for a large reply that came

    @property
    def unacknowledged(self) -> tuple[int, ...]:
        """The replies that came, and that the worker has not been told of by name."""
        return tuple(self._received)

    def receive(self, connection: Connection, read: list[Slot]) -> None:
        """Read what is there. `read` gets the slots that have to be completed once the reading is handed on."""
        try:
            frames = connection.receive()
        except (OSError, ValueError):
            frames = None
        except ProtocolError as error:
            log.error("closing the connection to %s: %s", self._link.member.name, error)
            self._runtime.reply_events.others_may_read()
            self._link.break_off(connection, error)
            return
        if frames is None:
            self._runtime.reply_events.others_may_read()  # another thread may be dialling again, and hold the lock
            self._link.lost(connection)
            return
        self.last_heard = time.monotonic()
        if self._most:
            self._refuse_beyond(frames)
        acknowledge = False
        for frame in frames:
            if frame.is_large:
                acknowledge = True
            if frame.kind == NOTICE:
                self._hear(frame.message)
                continue
            number = frame.request_id
            self._received.append(number)
            slot = self._slots.pop(number, None)  # one step: who takes it out completes it
            if slot is None:
                self._hear_late(frame)
                continue
            slot.frame = frame
            slot.done = True  # before looking: a caller that will sleep makes its lock, then looks whether it is done
            if slot.watched or slot.wake is not None:
                if self._announced(slot, frame):
                    read.append(slot)
            elif slot.complete is not None:
                read.append(slot)
        if connection.outbox:
            connection.flush()  # it never waits: this thread reads
        if len(self._received) > _MOST_UNACKNOWLEDGED:
            self.acknowledge(connection, LAZY)
        elif acknowledge and not self._owes:
            self._owes = True
            connection.flush_within(LAZY)  # the next request says so as well, and usually comes much sooner

    def _refuse_beyond(self, frames: list[Frame]) -> None:
        """A few bytes can say that they are to be repeated without end. Nobody here computes with that: the reply is
        taken for a refusal."""
        for frame in frames:
            nbytes = written_out(frame.tensors) if frame.tensors else 0
            if nbytes > self._most or not is_modest(frame.payload):
                what = f"tensors of {nbytes} bytes" if nbytes > self._most else "more values than one message may have"
                text = f"rule 'max_message_bytes': {what} came, written out; at most {self._most}"
                frame.kind = FAILURE
                frame.message = ExceptionReply(self._link.member.name, CallRefused.__name__, text, "")
                frame.tensors, frame.payload, frame.data, frame.segments, frame.buffers = (), b"", None, (), ()

    def _announced(self, slot: Slot, frame: Frame) -> bool:
        """A reply came that is recorded, or whose caller sleeps. Whether the slot has to be completed."""
        if self._audit is not None:
            self._audit.came(self._link.member.name, frame.message, frame.payload, frame.tensors, slot.what())
        return self._announce(slot)

    def _hear(self, message: AnyMessage) -> None:
        if type(message) is Goodbye:
            self._runtime.reply_events.others_may_read()  # those who are told of it may have to tell others
            self._link.said_goodbye(message.ending)
        elif type(message) is Exhausted:
            self._link.exhausted = (time.monotonic(), message.threads, message.running)

    def _hear_late(self, frame: Frame) -> None:
        """Nobody waits for this reply: its caller gave up, or it is a second copy."""
        # To a call there is an `Ack` only if the `Ping` in its place has come first: see `Connecting`.
        if self._pending.is_late(frame.request_id, never_came=type(frame.message) is Ack):
            self._runtime.reply_events.others_may_read()
            for layer in self._runtime.layers:
                layer.on_late_reply(frame, self._link.member.worker_id)

    def attach(self, connection: Connection) -> None:
        """This connection is read from now on."""
        connection.before_flush = partial(self._acknowledge_if_due, connection)
        if self._owes:
            connection.flush_within(LAZY)

    def _acknowledge_if_due(self, connection: Connection) -> None:
        if self._owes and not connection.closed:  # else it is owed on the next one
            self.acknowledge(connection)

    def acknowledge(self, connection: Connection, within: float = 0.0) -> None:
        """A large reply came, or many: let their sender forget them. By the thread that reads, or the timer's.

        A header acknowledges all before the oldest request that waits. If that waits for long, those behind it must be
        named, or their replies would pile up at the worker."""
        self._owes = False
        lowest = self._pending.lowest()
        named = array.array("Q")
        while self._received:
            try:
                request_id = self._received.pop()
            except IndexError:  # the other thread does the same
                break
            if request_id >= lowest:
                named.append(request_id)
        connection.mention(Ack(), lowest, within, named.tobytes())  # it never waits
