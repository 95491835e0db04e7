"""A link carries this worker's requests to one other worker, and brings the replies back.

The thread that waits for a reply reads it itself: no other thread has to wake up for it. While one thread reads, others
that wait on the same link sleep; the reader completes their slots as replies come and passes the reading on when its
own is there. Replies nobody waits for in person (futures) are read by the crew.

    IDLE      nothing is expected, or nobody looks
    ARMED     the crew is told by the kernel when a reply comes
    READING   a thread reads
"""

import array
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from telegrad.errors import ProtocolError, RpcTimeout, SerializationError, TelegradError, WorkerDied
from telegrad.rpc.at_most_once import KEPT_NOTICES
from telegrad.rpc.blocking import blocking, local
from telegrad.rpc.flusher import BURST, LAZY
from telegrad.rpc.pending import FOREVER, Pending, Slot
from telegrad.rpc.spin import Spinner
from telegrad.transport.connection import Connection
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.messages import Ack, AnyMessage, Goodbye, Ping

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent
    from telegrad.rpc.workers import Member

log = logging.getLogger("telegrad.rpc")

IDLE, ARMED, READING = "idle", "armed", "reading"
_MOST_UNACKNOWLEDGED = 256  # replies that the worker may have to remember for a caller that asks nothing more
_LOOK_AGAIN_SECONDS = 1.0
_BURST = 16  # calls in flight from which on small ones may wait a moment to share a write


class Link:
    """Requests to one incarnation of one worker."""

    def __init__(self, agent: "Agent", member: "Member", number: int) -> None:
        self.agent = agent
        self.member = member
        self.number = number
        self.pending = Pending()
        self.functions: dict[Any, tuple[int, bytes]] = {}  # what was sent once is a number afterwards
        self.main_by_value = False
        self.dead: WorkerDied | None = None
        self.last_heard = 0.0
        self.quiet_since = 0.0  # since when something is expected, for the heartbeat
        self.sent = 0
        self._function_numbers = itertools.count(1)
        self._notice_ids = itertools.count(1)
        self._notices: deque[tuple[int, AnyMessage]] = deque(maxlen=KEPT_NOTICES)
        self._last_asked = 0.0  # in a burst
        self._received: list[int] = []  # replies since the last acknowledgement
        self._connection: Connection | None = None
        self._dial_lock = threading.Lock()
        self._lock = threading.Lock()
        self._state = IDLE
        self._waiters: deque[Slot] = deque()
        self._spinner = Spinner()
        self._settled = threading.Event()  # clear while a lost connection is neither replaced nor given up
        self._settled.set()

    def __repr__(self) -> str:
        return f"<Link to {self.member.name!r}: {len(self.pending)} pending, {self._state}>"

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    def next_function_number(self) -> int:
        """A number for a function that has none on this link yet."""
        return next(self._function_numbers)

    # --- sending ---

    def connection(self, deadline: float = FOREVER) -> Connection:
        """The connection, made if there is none yet. TimeoutError at the deadline, WorkerDied if nobody answers."""
        connection = self._connection
        if connection is not None:
            return connection
        if self.dead is not None:
            raise self.dead.again()
        with blocking():
            left = -1.0 if deadline == FOREVER else max(0.0, deadline - time.monotonic())
            if not self._dial_lock.acquire(timeout=left):
                raise TimeoutError(f"worker {self.member.name!r} is still being dialled")
            try:
                return self._connection if self._connection is not None else self._dial(deadline)
            except WorkerDied as error:
                # Kept as text and raised anew below: an error in a variable of a frame it passed is a cycle.
                text, why = str(error), f"worker {self.member.name!r} is gone: {error.__cause__ or error}"
                final = self.agent.health.is_final(self.member, error)
                if final:
                    self.dead = error.again()  # at once: those who wait for the lock need not dial as well
            finally:
                self._dial_lock.release()
        if final:
            self.agent.lost(self.member, why)
        if self.dead is not None:
            raise self.dead.again()
        raise WorkerDied(text, worker=self.member.name, incarnation=self.member.incarnation)

    def _dial(self, deadline: float) -> Connection:
        """Dial, and send what may not have arrived: the worker knows by the ids what it has already taken."""
        if self.dead is not None:
            raise self.dead.again()
        # Not for longer than a silent worker is waited for: the lock held here is needed to give it up.
        limit = time.monotonic() + self.agent.health.patience
        while True:
            connection, self.main_by_value = self.agent.dial(self.member, self.number, self._writing_waits, deadline)
            try:
                self._send_again(connection, limit)
                break
            except (OSError, ValueError) as error:  # lost as well: whether the worker lives is for the dialling to say
                connection.close()
                if time.monotonic() >= min(limit, deadline):
                    raise self.agent.health.unreachable(self.member, error) from error
            except BaseException:
                connection.close()
                raise
        self.last_heard = time.monotonic()
        connection.after_hold = self._arm
        connection.copier.ask_for_help = self.agent.crew.submit
        self.agent.crew.watch(connection.stream.fileno(), self._readable, armed=False)
        self._connection = connection  # only now may others send: what came before is on its way
        self._settled.set()
        return connection

    def _send_again(self, connection: Connection, deadline: float) -> None:
        for number, notice in list(self._notices):
            connection.send(Kind.NOTICE, number, 0, notice, deadline=deadline)
        for slot in self.pending.snapshot():
            connection.send(Kind.REQUEST, slot.request_id, 0, *slot.whole(), deadline=deadline)
        # Layers above want to hear of replies that come too late. Under the number of a request that was taken this is
        # no new one: its reply comes again. One that was lost is answered as what this is.
        for request_id in self.pending.overdue():
            connection.send(Kind.REQUEST, request_id, 0, Ping(), deadline=deadline)

    def request(
        self,
        slot: Slot,
        message: AnyMessage,
        payload: bytes = b"",
        tensors: Sequence[Any] = (),
        segments: Sequence[Any] = (),
    ) -> None:
        """Send a request whose reply `slot` waits for. Errors of the sending itself are raised."""
        try:
            connection = self.connection(slot.deadline)
        except WorkerDied:
            raise
        except TimeoutError:
            raise self.timeout_error(slot) from None
        slot.resend = (message, payload, tensors, segments)
        # Count before sending: the reply may come first.
        ack, earliest = self.pending.admit(slot)
        if earliest:
            self.agent.keeper.at(slot.deadline, self.expire)
        self.sent += 1
        deadline = None if slot.deadline == FOREVER else slot.deadline
        # In a burst of calls nobody waits for yet, small ones share a write: the reader of replies sends them on.
        hold = slot.complete is not None and not slot.attended and len(self.pending) > _BURST
        try:
            connection.send(
                Kind.REQUEST, slot.request_id, ack, message, payload, tensors, segments, deadline=deadline, hold=hold
            )
        except TimeoutError:
            self.pending.give_up(slot.request_id)
            raise self.timeout_error(slot) from None
        except SerializationError:
            self.pending.take(slot.request_id)
            raise
        except (OSError, ValueError):  # ValueError: closed by another thread meanwhile
            self._lost(connection)
        if connection.closed:
            self._send_over_next(connection, Kind.REQUEST, slot.request_id, 0, *slot.whole())
            if self.dead is not None and self.pending.take(slot.request_id) is not None:
                raise self.died(slot) from None
        if hold:
            # Nor are replies read one by one then: completing a future lets go of the GIL, and each time the thread
            # that asks and the thread that reads would fight for it.
            self._last_asked = slot.since
            self.agent.flusher.within(BURST, connection)
        elif slot.complete is not None and not slot.attended:
            self._arm()

    def look_out(self) -> None:
        """Have the crew look for replies, unless a thread reads already."""
        self._arm()

    def notify(self, message: AnyMessage, lazy: bool = False) -> None:
        """Send a notice: it has no reply, and a dead worker does not need it. A lazy one goes with the next message.

        The latest are kept, since nobody says which have arrived, and sent again over the next connection."""
        number = next(self._notice_ids)
        self._notices.append((number, message))
        try:
            connection = self.connection()
        except TelegradError:
            log.debug("a notice to %s was not delivered: %s", self.member.name, message)
            return
        try:
            connection.send(Kind.NOTICE, number, self.pending.lowest(), message, hold=True)
            if lazy:
                self.agent.flusher.within(LAZY, connection)
            else:
                connection.flush(deadline=time.monotonic() + self.agent.health.patience)
        except TimeoutError:
            log.debug("%s does not take in a notice; it goes with the next message", self.member.name)
        except (OSError, ValueError):
            self._lost(connection)
        if connection.closed:
            self._send_over_next(connection, Kind.NOTICE, number, 0, message)

    def _send_over_next(self, old: Connection, *frame: Any) -> None:
        """What was sent over `old` as that ended is lost, unless the next dial is still to come and sends it again."""
        with self._dial_lock:
            connection = self._connection
        if connection is not None and connection is not old:
            try:
                connection.send(*frame)
            except (OSError, ValueError):
                self._lost(connection)

    def farewell(self, message: AnyMessage) -> None:
        """Tell the worker that this one leaves, if it can be told without waiting."""
        connection = self._connection
        if connection is not None:
            try:
                connection.send(Kind.NOTICE, 0, 0, message, deadline=0.0)
            except (OSError, ValueError):
                log.debug("%s could not be told goodbye", self.member.name)

    def _writing_waits(self) -> None:
        # The peer may be busy writing to us: somebody must read while this thread waits to write.
        self._arm()

    # --- waiting ---

    def wait(self, slot: Slot) -> None:
        """Return when `slot` is done; raises RpcTimeout at its deadline, unless `slot.complete` takes the error."""
        while not slot.done:
            with self._lock:
                if self._state == READING:
                    if slot.wake is None:
                        slot.wake = threading.Lock()
                        slot.wake.acquire()
                    if slot.done:
                        return  # completed before there was a lock to release
                    self._waiters.append(slot)
                    reads = False
                else:
                    if self._state == ARMED and self._connection is not None:
                        self.agent.crew.disarm(self._connection.stream.fileno())
                    self._state = READING
                    reads = True
            if reads:
                try:
                    self._read_until(slot)
                finally:
                    self._stop_reading()
            else:
                self._sleep_until_woken(slot)
            if not slot.done and slot.deadline <= time.monotonic():
                if self.pending.give_up(slot.request_id) is None:
                    continue  # it is being completed by another thread this very moment
                slot.done = True
                with self._lock:
                    if self._state == IDLE:  # the reading may have been passed to this thread as it woke by itself
                        self._pass_on()
                if slot.complete is not None:  # its future says so, now and whenever it is asked again
                    slot.error = self.timeout_error(slot)
                    slot.complete(slot)
                    return
                raise self.timeout_error(slot)

    def _sleep_until_woken(self, slot: Slot) -> None:
        left = -1.0 if slot.deadline == FOREVER else max(0.0, slot.deadline - time.monotonic())
        with blocking():
            woken = slot.wake.acquire(timeout=left)
        if woken and slot.done:
            slot.wake.release()  # several threads may wait for one future: each wakes the next
        with self._lock:
            if slot in self._waiters:
                self._waiters.remove(slot)

    def _read_until(self, slot: Slot) -> None:
        spinner = self._spinner
        crew = self.agent.crew
        disturbs = crew.works if local.turn is None else crew.another_works
        while not slot.done:
            connection = self._connection
            if connection is None:  # lost: the agent dials again, or finds that the worker is dead
                left = slot.deadline - time.monotonic()
                with blocking():
                    self._settled.wait(max(0.0, min(left, 3600.0)))
                if left <= 0:
                    return
                continue
            if not spinner.wait(connection.stream.readable, disturbs):
                left = slot.deadline - time.monotonic()
                if left <= 0:
                    return
                with blocking():
                    # Not for ever: the descriptor may be closed, and its number used again, before this sleeps.
                    ready = connection.stream.readable(min(left, _LOOK_AGAIN_SECONDS))
                if not ready:
                    continue
            self._receive(connection)

    def _stop_reading(self, woken: bool = False) -> None:
        with self._lock:
            self._pass_on()
            if woken and self._state == IDLE and self._connection is not None:
                # The event that woke the crew is spent: have the kernel tell of the worker's end again.
                self.agent.crew.disarm(self._connection.stream.fileno())

    def _pass_on(self) -> None:
        """Under the lock: let one who waits read, or the crew if others wait for futures only."""
        self._state = IDLE
        while self._waiters:
            heir = self._waiters.popleft()
            if not heir.done:
                heir.wake.release()
                return
        connection = self._connection
        if connection is None:
            return
        if len(self.pending) > _BURST and time.monotonic() - self._last_asked < BURST:
            self.agent.flusher.within(BURST, connection)  # calls keep coming: read their replies together
        elif self.pending or self.pending.has_overdue:
            self._state = ARMED
            self.agent.crew.arm(connection.stream.fileno())

    def _arm(self) -> None:
        with self._lock:
            if self._state == IDLE and self._connection is not None:
                self._state = ARMED
                self.agent.crew.arm(self._connection.stream.fileno())

    def _readable(self) -> None:
        """The crew: the kernel says that a reply came, or that the worker ended while nothing was expected of it."""
        with self._lock:
            connection = self._connection
            if self._state == READING or connection is None:
                return
            self._state = READING
        try:
            self._receive(connection)
            while not connection.closed and connection.stream.readable(0):
                self._receive(connection)
        finally:
            self._stop_reading(woken=True)

    # --- receiving ---

    def _receive(self, connection: Connection) -> None:
        try:
            frames = connection.receive()
        except (OSError, ValueError):
            frames = None
        except ProtocolError as error:
            log.error("closing the connection to %s: %s", self.member.name, error)
            self._break(connection, error)
            return
        if frames is None:
            self._lost(connection)
            return
        self.last_heard = time.monotonic()
        for frame in frames:
            self._take(frame)
            if frame.is_large or len(self._received) > _MOST_UNACKNOWLEDGED:
                self._acknowledge(connection)
        self._flush(connection)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.NOTICE:
            if type(frame.message) is Goodbye:
                self.agent.said_goodbye(self.member)
            return
        self._received.append(frame.request_id)
        slot = self.pending.take(frame.request_id)
        if slot is None:
            if self.pending.is_late(frame.request_id):
                self.agent.late_reply(frame, self.member)
            return
        slot.frame = frame
        self._finish(slot)

    def _flush(self, connection: Connection) -> None:
        """Send what waited for company."""
        try:
            connection.flush(deadline=time.monotonic())  # this thread reads: it must not wait until the worker does
        except TimeoutError:
            self.agent.flusher.within(LAZY, connection)
        except (OSError, ValueError):
            log.debug("what was held back for %s goes over its next connection", self.member.name)

    def _acknowledge(self, connection: Connection) -> None:
        """A large reply came, or many: let their sender forget them now rather than with the next request.

        A header acknowledges all before the oldest request that waits. If that waits for long, those behind it must be
        named, or their replies would pile up at the worker."""
        received, self._received = self._received, []
        lowest = self.pending.lowest()
        named = array.array("Q", [request_id for request_id in received if request_id >= lowest])
        try:
            connection.send(Kind.NOTICE, 0, lowest, Ack(), named.tobytes(), hold=True)  # flushed by the reader
        except (OSError, ValueError):
            log.debug("an acknowledgement to %s was not delivered", self.member.name)

    def _finish(self, slot: Slot) -> None:
        slot.done = True
        if slot.complete is not None:
            # Callbacks may run for long, and may wait for another reply of this link; this thread reads it.
            self.agent.complete(slot)
        if slot.wake is not None:
            try:
                slot.wake.release()
            except RuntimeError:  # it woke by itself, at its deadline
                pass

    # --- failures ---

    def timeout_error(self, slot: Slot) -> RpcTimeout:
        """What a caller gets whose deadline passed."""
        return RpcTimeout(
            f"RPC ran for more than set timeout ({round(slot.timeout * 1000)} ms) and will now be marked with an "
            f"error: {slot.what()} did not return; worker {self.member.name!r} may still be running it. "
            "Pass a longer `timeout` if that is expected"
        )

    def died(self, slot: Slot) -> WorkerDied:
        """What a caller gets whose worker is gone."""
        assert self.dead is not None
        text = f"{self.dead} It was asked: {slot.what()}."
        return WorkerDied(text, worker=self.member.name, incarnation=self.member.incarnation)

    def expire(self) -> None:
        """The keeper: a deadline of a future may have passed."""
        late, again = self.pending.expired(time.monotonic())
        for slot in late:
            slot.error = self.timeout_error(slot)
            slot.done = True
            self.agent.complete(slot)
        if again != FOREVER:
            self.agent.keeper.at(again, self.expire)

    def silent_since(self) -> float:
        """When the worker was last heard, or took in more of what is being written to it."""
        connection = self._connection
        return max(self.last_heard, self.quiet_since, 0.0 if connection is None else connection.stream.last_written)

    def host_answers(self, seconds: float) -> bool:
        """Whether the worker's kernel confirmed a ping within `seconds`, though the worker itself says nothing."""
        connection = self._connection
        return connection is not None and connection.stream.peer_host_answers(seconds)

    def ping(self) -> None:
        """The keeper: ask whether the worker lives."""
        connection = self._connection
        if connection is not None:
            try:
                connection.send(Kind.NOTICE, 0, self.pending.lowest(), Ping(), deadline=time.monotonic())
            except (OSError, TimeoutError):
                log.debug("a ping to %s could not be sent", self.member.name)

    def tidy(self, before: float) -> None:
        """Return memory that has been idle since `before`; the worker's own word on that is read by the crew."""
        connection = self._connection
        if connection is not None and connection.tidy(before):
            self._arm()

    def _lost(self, connection: Connection) -> None:
        """The connection ended. Dial again at once: a living worker answers, a dead one refuses."""
        with self._dial_lock:
            if self._connection is not connection:
                return  # another thread noticed first
            self.agent.crew.forget(connection.stream.fileno())
            connection.close()
            self._settled.clear()
            self._connection = None
            with self._lock:
                if self._state == ARMED:
                    self._state = IDLE
        self.agent.link_lost(self)

    def resume(self, deadline: float) -> None:
        """Replace a lost connection. TimeoutError at the deadline."""
        self.connection(deadline)
        if self.pending:
            self._arm()

    def _break(self, connection: Connection, error: TelegradError) -> None:
        """The worker sends nonsense: fail what waits for it, and nothing else."""
        with self._dial_lock:
            if self._connection is connection:
                self.agent.crew.forget(connection.stream.fileno())
                connection.close()
                self._connection = None
        for slot in self.pending.take_all():
            slot.error = ProtocolError(f"worker {self.member.name!r} broke the protocol during {slot.what()}: {error}")
            self._finish(slot)

    def fail(self, error: WorkerDied) -> None:
        """The worker is gone for good."""
        with self._dial_lock:
            self.dead = error
            connection, self._connection = self._connection, None
        if connection is not None:
            self.agent.crew.forget(connection.stream.fileno())
            connection.close()
        self._fail_all()
        self._settled.set()

    def _fail_all(self) -> None:
        for slot in self.pending.take_all():
            slot.error = self.died(slot)
            self._finish(slot)

    def close(self) -> None:
        """End the link from this side; what still waits is told so."""
        self.fail(WorkerDied(f"this worker has shut down; nothing more can be asked of {self.member.name!r}."))
