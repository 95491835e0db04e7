"""A link carries this worker's requests and notices to one other worker, over one connection after the other.

What was sent is remembered until it is answered, and sent again over the next connection if the one it went over is
lost. A link ends with the worker: then everything that still waits is told so. Who reads the replies is in
`reply_reader.py`.
"""

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from telegrad import trace
from telegrad.cuda import order
from telegrad.errors import CallCancelled, ProtocolError, RpcTimeout, SerializationError, TelegradError, WorkerDied
from telegrad.rpc.client.function_table import FunctionTable
from telegrad.rpc.client.outcomes import OWN_END, LinkEvents, Unanswered, died_meanwhile, does_not_answer
from telegrad.rpc.client.pending import FOREVER, Pending, Slot
from telegrad.rpc.client.reply_reader import BURST_CALLS, ReplyReader
from telegrad.rpc.client.timeouts import NOT_CONNECTED, NOT_TAKEN, LateCalls, timeout_error
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.threads.delayed_flush import BURST, LAZY
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.torch_modes import stand_in
from telegrad.rpc.workers import Member
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import TICKET_BYTES
from telegrad.wire.codec import Packed
from telegrad.wire.frames import NOTICE, REQUEST
from telegrad.wire.messages import AnyMessage, CancelCall, Ping
from telegrad.wire.tensor.small import describe_small
from telegrad.wire.tensor.tensors import describe

log = logging.getLogger("telegrad.rpc")

KEPT_NOTICES = 256  # the latest, to be sent again over a new connection; a session remembers more than that
NOTHING = Packed(b"", [])


class Link:
    """Requests to one incarnation of one worker."""

    def __init__(self, runtime: Runtime, events: LinkEvents, member: Member, number: int) -> None:
        self.runtime = runtime
        self._io_threads = runtime.io_threads
        self._events = events
        self._audit = runtime.layers.audit
        self.member = member
        self.number = number
        self.ticket = os.urandom(TICKET_BYTES)  # shown with each connection: nobody else can go on with this link
        self.pending = Pending()
        self.functions = FunctionTable()
        self.main_by_value = False
        self.dead: WorkerDied | None = None
        self.current: Connection | None = None  # what is sent goes over it; `connection()` makes it
        self.settled = threading.Event()  # clear while a lost connection is neither replaced nor given up
        self.settled.set()
        self.replies = ReplyReader(self)
        self.wait = self.replies.wait  # bound: a caller waits where the replies are read
        self.poll = self.replies.poll
        self.expect = self.replies.arm  # have the I/O threads read what comes
        self.exhausted = (0.0, 0, 0)  # when the worker last said that what is asked waits, and why (`Exhausted`)
        self._late = LateCalls(self, self.replies.settle)
        self._notice_ids = itertools.count(1)
        self._notices: deque[tuple[int, AnyMessage]] = deque(maxlen=KEPT_NOTICES)
        self._dial_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Link to {self.member.name!r}: {len(self.pending)} pending, {self.replies.state}>"

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self.current is not None

    @property
    def dialling(self) -> bool:
        """Whether a thread is making a connection, or giving one up."""
        return self._dial_lock.locked()

    @property
    def kept_notices(self) -> int:
        """How many notices would be sent again over a new connection: whether one arrived, nobody says."""
        return len(self._notices)

    # --- sending ---

    def connection(self, deadline: float = FOREVER) -> Connection:
        """The connection, made if there is none yet. TimeoutError at the deadline, WorkerDied if nobody answers."""
        connection = self.current
        if connection is not None:
            return connection
        if self.dead is not None:
            raise self.dead.again()
        with blocking():
            left = -1.0 if deadline == FOREVER else max(0.0, deadline - time.monotonic())
            if not self._dial_lock.acquire(timeout=left):
                raise TimeoutError(f"worker {self.member.name!r} is still being dialled")
            try:
                dialled = self.current if self.current is not None else self._dial(deadline)
                if isinstance(dialled, Unanswered) and dialled.gone:
                    # At once: those who wait for the lock need not dial as well.
                    self.dead = does_not_answer(self.member, dialled)
            finally:
                self._dial_lock.release()
        if not isinstance(dialled, Unanswered):
            return dialled
        if dialled.gone:
            self._events.unanswered(self.member, f"worker {self.member.name!r} is gone: {dialled.why}")
            raise self.dead.again() if self.dead is not None else does_not_answer(self.member, dialled)
        raise does_not_answer(self.member, dialled)

    def _dial(self, deadline: float) -> Connection | Unanswered:
        """Dial, and send what may not have arrived: the worker knows by the ids what it has already taken."""
        if self.dead is not None:
            raise self.dead.again()
        # Not for longer than a silent worker is waited for: the lock held here is needed to give it up.
        limit = time.monotonic() + self.runtime.patience
        while True:
            dialled = self._events.dial(self, deadline)
            if isinstance(dialled, Unanswered):
                return dialled
            connection, self.main_by_value = dialled.connection, dialled.main_by_value
            try:
                self._send_again(connection, limit)
                break
            except (OSError, ValueError) as error:  # lost as well: whether the worker lives is for the dialling to say
                connection.close()
                if time.monotonic() >= min(limit, deadline):
                    return Unanswered(f"its new connection closed: {error}", gone=False)
            except BaseException:
                connection.close()
                raise
        self.replies.last_heard = time.monotonic()
        connection.after_hold = self.replies.arm
        connection.copier.ask_for_help = self.runtime.helpers.ask
        self._io_threads.register(connection.stream.fileno(), self.replies.readable, armed=False)
        self.current = connection  # only now may others send: what came before is on its way
        self.settled.set()
        return connection

    def _send_again(self, connection: Connection, deadline: float) -> None:
        if order.active and self.pending:
            order.synchronize()  # this thread's streams are not those the tensors were made on
        for number, notice in list(self._notices):
            connection.send(NOTICE, number, 0, notice, deadline=deadline)
        for slot in self.pending.snapshot():
            connection.send(REQUEST, slot.request_id, 0, *slot.whole(), deadline=deadline)
        # Layers above want to hear of replies that come too late. Under the number of a request that was taken this is
        # no new one: its reply comes again. One that was lost is answered as what this is.
        for request_id in self.pending.overdue():
            connection.send(REQUEST, request_id, 0, Ping(), deadline=deadline)

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
    ) -> Slot:
        """Send a request; its slot is completed by `complete`, or waited for with `wait`, or both if `attended`.

        `definition` is that of the function the message calls by its number."""
        tensors = packed.tensors
        specs: Any = ()
        memory: Any = b""
        if tensors:
            specs, memory = describe_small(tensors) or describe(tensors)
            if order.active or self.member.device_maps:
                specs, memory = self.runtime.placement.apply(self.member, tensors, specs, memory)
        now = time.monotonic()
        slot = Slot(what, timeout, now + timeout if timeout else FOREVER)
        slot.link = self
        slot.since = now
        payload = packed.payload
        slot.resend = (message, payload, specs, memory)
        unattended = False
        if complete is not None:
            slot.complete = complete
            slot.attended = attended
            unattended = not attended
            if future is not None:
                slot.future = future
                future.awaited = slot
        slot.on_reply = on_reply
        if definition:
            slot.definition = definition
        if order.active:
            slot.in_place = order.asking(waits=complete is None)
        if trace.recorder is not None or self._audit is not None:
            self._record(slot, message, payload, specs, memory)
        connection = self.current or self._connection_for(slot)
        # Count before sending: the reply may come first.
        ack, earliest = self.pending.admit(slot)
        number = slot.request_id
        if earliest:
            self.runtime.timer.at(slot.deadline, self.expire)
        # In a burst of calls nobody waits for yet, small ones share a write: the reader of replies sends them on.
        hold = unattended and len(self.pending) > BURST_CALLS
        deadline = slot.deadline if timeout else None
        try:
            stay = slot.in_place
            connection.send(
                REQUEST, number, ack, message, payload, specs, memory, deadline=deadline, hold=hold, in_place=stay
            )
        except TimeoutError:
            self.pending.give_up(number)
            raise self.timeout_error(slot, NOT_TAKEN) from None
        except SerializationError:
            self.pending.take(number)
            raise
        except (OSError, ValueError):  # ValueError: closed by another thread meanwhile
            self.lost(connection)
        if connection.closed:
            self._send_over_next(connection, REQUEST, number, 0, *slot.whole())
            if self.dead is not None and self.pending.take(number) is not None:
                raise self.died(slot) from None
        if hold:
            # Nor are replies read one by one then: completing a future lets go of the GIL, and each time the thread
            # that asks and the thread that reads would fight for it.
            self.replies.last_asked = now
            self.runtime.delayed_flush.within(BURST, connection)
        elif unattended:
            self.replies.arm()
        return slot

    def _record(self, slot: Slot, message: AnyMessage, payload: bytes, specs: Any, memory: Any) -> None:
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
            connection.send(NOTICE, number, 0, message, hold=True)
            if lazy:
                self.runtime.delayed_flush.within(LAZY, connection)
            else:
                connection.flush(deadline=time.monotonic() + self.runtime.patience)
        except TimeoutError:
            log.debug("a notice to %s cannot be written now; it goes with the next message", self.member.name)
        except (OSError, ValueError):
            self.lost(connection)
        if connection.closed:
            self._send_over_next(connection, NOTICE, number, 0, message)

    def _send_over_next(self, old: Connection, *frame: Any) -> None:
        """What was sent over `old` as that ended is lost, unless the next dial is still to come and sends it again."""
        with self._dial_lock:
            connection = self.current
        if connection is not None and connection is not old:
            try:
                connection.send(*frame)
            except (OSError, ValueError):
                self.lost(connection)

    def farewell(self, message: AnyMessage) -> None:
        """Tell the worker that this one leaves, if it can be told without waiting."""
        self._mention(message, 0.0)

    def ping(self) -> None:
        """The timer: ask whether the worker lives."""
        self._mention(Ping(), time.monotonic())

    def _mention(self, message: AnyMessage, deadline: float | None = None) -> None:
        """Send a notice that need not arrive: by the deadline, or with the next message."""
        connection = self.current
        if connection is not None:
            try:
                connection.send(NOTICE, 0, self.pending.lowest(), message, deadline=deadline, hold=deadline is None)
                if deadline is None:
                    self.runtime.delayed_flush.within(LAZY, connection)
            except (OSError, ValueError):
                log.debug("%s was not told: %s", self.member.name, message)

    # --- failures ---

    def said_goodbye(self, ending: str) -> None:
        """The worker leaves on purpose, or its program ended."""
        self._events.said_goodbye(self.member, ending)

    def timeout_error(self, slot: Slot, where: str = "", *, ask: bool = False) -> RpcTimeout:
        """What a caller gets whose deadline passed. `ask` if the thread may wait a moment for what the worker says."""
        if trace.recorder is not None:
            trace.recorder.answered(slot)
        return timeout_error(self, slot, where, ask)

    def died(self, slot: Slot) -> WorkerDied:
        """What a caller gets whose worker is gone."""
        assert self.dead is not None
        return died_meanwhile(slot, self.member, self.dead)

    def cancel(self, slot: Slot) -> bool:
        """The caller no longer wants the reply. False if it has it, or is about to."""
        if self.pending.give_up(slot.request_id) is None:
            return False
        self._mention(CancelCall(slot.request_id))
        slot.error = CallCancelled(f"{slot.what()} was cancelled")
        self.replies.settle([slot])
        return True

    def timed_out(self, slot: Slot) -> None:
        """The caller stopped waiting at its deadline."""
        if stand_in.in_force.cancels_at_timeout:
            self._mention(CancelCall(slot.request_id))

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
        return max(self.replies.last_heard, 0.0 if connection is None else connection.last_progress)

    def host_answers(self, seconds: float) -> bool:
        """Whether the worker's kernel confirmed a ping within `seconds`, though the worker itself says nothing."""
        connection = self.current
        return connection is not None and connection.peer_host_answers(seconds)

    def tidy(self, before: float) -> None:
        """Return memory that has been idle since `before`; the worker's own word on that is read by the I/O threads."""
        connection = self.current
        if connection is not None and connection.tidy(before):
            self.replies.arm()

    def lost(self, connection: Connection) -> None:
        """The connection ended. Dial again at once: a living worker answers, a dead one refuses."""
        with self._dial_lock:
            if self.current is not connection:
                return  # another thread noticed first
            self._io_threads.forget(connection.stream.fileno())
            connection.close()
            self.settled.clear()
            self.current = None
            self.replies.disarmed()
        self._events.link_lost(self)

    def resume(self, deadline: float) -> None:
        """Replace a lost connection. TimeoutError at the deadline."""
        self.connection(deadline)
        if self.pending:
            self.replies.arm()

    def break_off(self, connection: Connection, error: TelegradError) -> None:
        """The worker sends nonsense: fail what waits for it, and nothing else."""
        with self._dial_lock:
            if self.current is connection:
                self._io_threads.forget(connection.stream.fileno())
                connection.close()
                self.current = None
        waiting = self.pending.take_all()
        for slot in waiting:
            slot.error = ProtocolError(f"worker {self.member.name!r} broke the protocol during {slot.what()}: {error}")
        self.replies.settle(waiting)

    def fail(self, error: WorkerDied) -> None:
        """The worker is gone for good."""
        with self._dial_lock:
            self.dead = error
            connection, self.current = self.current, None
        if connection is not None:
            self._io_threads.forget(connection.stream.fileno())
            connection.close()
        waiting = self.pending.take_all()
        for slot in waiting:
            slot.error = self.died(slot)
        self.replies.settle(waiting)
        self.settled.set()

    def close(self) -> None:
        """End the link from this side; what still waits is told so."""
        self.fail(WorkerDied(f"{OWN_END}; nothing more can be asked of {self.member.name!r}."))
