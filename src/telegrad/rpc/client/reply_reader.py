"""Who reads the replies of a link, and what becomes of each.

The thread that waits for a reply reads it itself: no other thread has to wake up for it. While one thread reads, others
that wait on the same link sleep; the reader completes their slots as replies come and passes the reading on when its
own is there. Replies that no thread waits for (futures) are read by the I/O threads.

One rule for completions: the reader hands on the reading, then completes what it read. So a callback, or a hook of a
backward pass, may run for long and may wait for another reply of the same link. A thread that came to wait leaves to
the I/O threads what may run a user's code; and a reply that its caller came for (`attended`) is left to that caller.

    IDLE      nothing is expected, or nobody looks
    ARMED     the I/O threads is told by the kernel when a reply comes
    READING   a thread reads
"""

import array
import logging
import threading
import time
from collections import deque
from functools import partial
from typing import Any, Protocol

from telegrad import trace
from telegrad.errors import ProtocolError, RpcTimeout, TelegradError
from telegrad.rpc.client.pending import FOREVER, Pending, Slot
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.threads.delayed_flush import BURST, LAZY
from telegrad.rpc.threads.interrupts import interruptible
from telegrad.rpc.threads.spin import Spinner
from telegrad.rpc.threads.yield_turn import blocking, local
from telegrad.rpc.workers import Member
from telegrad.transport.connection import Connection
from telegrad.wire.frames import NOTICE, Frame
from telegrad.wire.messages import Ack, AnyMessage, Exhausted, Goodbye

log = logging.getLogger("telegrad.rpc")

IDLE, ARMED, READING = "idle", "armed", "reading"
BURST_CALLS = 16  # calls in flight from which on small ones may wait a moment to share a write
_MOST_UNACKNOWLEDGED = 256  # replies that the worker may have to remember for a caller that asks nothing more
_LOOK_AGAIN_SECONDS = 1.0
_MOST_READ = 256  # replies after which a reader hands on the reading, though more have come, to complete these


class ReadLink(Protocol):
    """The link whose replies are read, as far as the reader needs it."""

    runtime: Runtime
    member: Member
    pending: Pending
    current: Connection | None
    settled: threading.Event
    exhausted: tuple[float, int, int]

    def lost(self, connection: Connection) -> None:
        """The connection ended."""

    def break_off(self, connection: Connection, error: TelegradError) -> None:
        """The worker sends nonsense."""

    def said_goodbye(self, ending: str) -> None:
        """The worker leaves on purpose."""

    def timeout_error(self, slot: Slot, *, ask: bool = False) -> RpcTimeout:
        """What a caller gets whose deadline passed."""

    def timed_out(self, slot: Slot) -> None:
        """The caller of this request stopped waiting at its deadline."""


class ReplyReader:
    """The reading end of a link."""

    def __init__(self, link: ReadLink) -> None:
        self._link = link
        self._runtime = link.runtime
        self._io_threads = link.runtime.io_threads
        self._pending = link.pending
        self._slots = link.pending.slots
        self._audit = link.runtime.layers.audit
        self.state = IDLE
        self.last_heard = 0.0
        self.last_asked = 0.0  # when a call was held back in a burst
        self._received: list[int] = []  # replies since the last acknowledgement
        self._lock = threading.Lock()
        self._waiters: deque[Slot] = deque()
        self._spinner = Spinner()

    @property
    def unacknowledged(self) -> tuple[int, ...]:
        """The replies that came, and that the worker has not been told of by name."""
        return tuple(self._received)

    # --- waiting ---

    def wait(self, slot: Slot) -> None:
        """Return when `slot` is done; raises RpcTimeout at its deadline, unless `slot.complete` takes the error."""
        try:
            while not slot.done:
                with self._lock:
                    reads = self.state is not READING
                    if reads:
                        if self.state is ARMED and (connection := self._link.current) is not None:
                            self._io_threads.disarm(connection.stream.fileno())
                        self.state = READING
                    elif not self._queue(slot):
                        return  # completed before there was a lock to release
                if reads:
                    self._read_in_person(slot)
                else:
                    self._sleep_until_woken(slot)
                if not slot.done and slot.deadline <= time.monotonic():
                    self._time_out(slot)
        except BaseException:  # an interrupt: nobody waits for the reply any more
            self._abandon(slot)
            raise

    def poll(self, slot: Slot, seconds: float) -> bool:
        """Read once, in this thread, what comes within `seconds`, for a caller that waits for `slot` among others.
        False if nothing came, or another thread reads."""
        with self._lock:
            connection = self._link.current
            if self.state is READING or connection is None:
                return False
            if self.state is ARMED:
                self._io_threads.disarm(connection.stream.fileno())
            self.state = READING
        read: list[Slot] = []
        came = False
        try:
            came = connection.stream.readable(seconds)
            if came:
                self._receive(connection, read)
        finally:
            with self._lock:
                self._pass_on()
            if read:
                self._complete_in_person(read, slot)
        return came

    def _queue(self, slot: Slot) -> bool:
        """Under the lock: let a caller sleep until its reply is there, or the reading is passed to it."""
        if slot.wake is None:
            slot.wake = threading.Lock()
            slot.wake.acquire()
        if not slot.done:
            self._waiters.append(slot)
        return not slot.done

    def _time_out(self, slot: Slot) -> None:
        if self._pending.give_up(slot.request_id) is None:
            return  # it is being completed by another thread this very moment
        slot.done = True
        with self._lock:
            if self.state is IDLE:  # the reading may have been passed to this thread as it woke by itself
                self._pass_on()
        error = self._link.timeout_error(slot, ask=True)  # before the worker is told to give it up
        self._link.timed_out(slot)
        if slot.complete is None:
            raise error
        slot.error = error  # its future says so, now and whenever it is asked again
        slot.complete(slot)

    def _abandon(self, slot: Slot) -> None:
        if not slot.done and slot.complete is None and self._pending.give_up(slot.request_id) is not None:
            slot.done = True
        with self._lock:
            if slot in self._waiters:
                self._waiters.remove(slot)
            if self.state is IDLE:  # the reading may have been passed to this thread
                self._pass_on()

    def _sleep_until_woken(self, slot: Slot) -> None:
        left = -1.0 if slot.deadline == FOREVER else max(0.0, slot.deadline - time.monotonic())
        with blocking():
            woken = _acquire(slot.wake, left)
        if woken and slot.done:
            slot.wake.release()  # several threads may wait for one future: each wakes the next
        with self._lock:
            if slot in self._waiters:
                self._waiters.remove(slot)

    def _read_in_person(self, slot: Slot) -> None:
        """Read until `slot` is done, or others are that have to be completed; hand on the reading, and complete."""
        read: list[Slot] = []
        most = 0 if local.turn is None else 1  # this thread may be one of the I/O threads
        try:
            while not slot.done and not read:
                connection = self._link.current
                if connection is None:  # lost: the agent dials again, or finds that the worker is dead
                    left = slot.deadline - time.monotonic()
                    with blocking():
                        self._link.settled.wait(max(0.0, min(left, 3600.0)))
                    if left <= 0:
                        break
                    continue
                if not self._spinner.wait(connection.stream.readable, self._io_threads, most):
                    left = slot.deadline - time.monotonic()
                    if left <= 0:
                        break
                    with blocking():
                        # Not for ever: the descriptor may be closed, and its number used again, before this sleeps.
                        ready = connection.stream.readable(min(left, _LOOK_AGAIN_SECONDS))
                    if not ready:
                        continue
                self._receive(connection, read)
        finally:
            with self._lock:
                self._pass_on()
            if read:
                self._complete_in_person(read, slot)

    def _pass_on(self) -> None:
        """Under the lock: let one who waits read, or the I/O threads if others wait for futures only."""
        self.state = IDLE
        while self._waiters:
            heir = self._waiters.popleft()
            if not heir.done:
                heir.wake.release()
                return
        waiting = len(self._slots)
        connection = self._link.current
        if connection is None or not (waiting or self._pending.given_up):
            return
        if waiting > BURST_CALLS and time.monotonic() - self.last_asked < BURST:
            self._runtime.delayed_flush.within(BURST, connection)  # calls keep coming: read their replies together
        else:
            self.state = ARMED
            self._io_threads.arm(connection.stream.fileno())

    def arm(self) -> None:
        """Have the I/O threads look for replies, unless a thread reads already."""
        with self._lock:
            connection = self._link.current
            if self.state is IDLE and connection is not None:
                self.state = ARMED
                self._io_threads.arm(connection.stream.fileno())

    def disarmed(self) -> None:
        """The connection is lost: no more events of it. A thread that reads goes on with the next."""
        with self._lock:
            if self.state is ARMED:
                self.state = IDLE

    def readable(self) -> None:
        """I/O thread: a reply came, or the worker ended while nothing was expected of it."""
        with self._lock:
            connection = self._link.current
            if self.state is READING or connection is None:
                return
            self.state = READING
        read: list[Slot] = []
        try:
            self._receive(connection, read)
            while len(read) < _MOST_READ and not connection.closed and connection.stream.readable(0):
                self._receive(connection, read)
        finally:
            with self._lock:
                self._pass_on()
                if self.state is IDLE and self._link.current is connection:
                    # The event that woke the I/O threads is spent: have the kernel tell of the worker's end again.
                    self._io_threads.disarm(connection.stream.fileno())
            self.complete(read)

    # --- receiving ---

    def _receive(self, connection: Connection, read: list[Slot]) -> None:
        try:
            frames = connection.receive()
        except (OSError, ValueError):
            frames = None
        except ProtocolError as error:
            log.error("closing the connection to %s: %s", self._link.member.name, error)
            self._link.break_off(connection, error)
            return
        if frames is None:
            self._link.lost(connection)
            return
        self.last_heard = time.monotonic()
        acknowledge = False
        for frame in frames:
            slot = self.take(frame)
            if slot is not None:
                read.append(slot)
            if frame.is_large:
                acknowledge = True
        if connection.outbox:
            self.flush(connection)
        if acknowledge or len(self._received) > _MOST_UNACKNOWLEDGED:
            self.acknowledge(connection)

    def take(self, frame: Frame) -> Slot | None:
        """A frame came; the slot that the reader has to complete when it has handed on the reading."""
        if frame.kind == NOTICE:
            self._hear(frame.message)
            return None
        number = frame.request_id
        self._received.append(number)
        slot = self._slots.pop(number, None)  # one step: who takes it out completes it
        if slot is None:
            if self._pending.is_late(number):
                for layer in self._runtime.layers:
                    layer.on_late_reply(frame, self._link.member.worker_id)
            return None
        if self._audit is not None:
            self._audit.came(self._link.member.name, frame.message, frame.payload, frame.tensors, slot.what())
        slot.frame = frame
        slot.done = True  # before looking: a caller that will sleep makes its lock, then looks whether it is done
        if slot.wake is None and trace.recorder is None:
            return slot if slot.complete is not None else None
        return slot if self._finish(slot) else None

    def _hear(self, message: AnyMessage) -> None:
        if type(message) is Goodbye:
            self._link.said_goodbye(message.ending)
        elif type(message) is Exhausted:
            self._link.exhausted = (time.monotonic(), message.threads, message.running)

    def flush(self, connection: Connection) -> None:
        """Send what waited to be sent together."""
        try:
            connection.flush(deadline=time.monotonic())  # this thread reads: it must not wait until the worker does
        except TimeoutError:
            self._runtime.delayed_flush.within(LAZY, connection)
        except (OSError, ValueError):
            log.debug("what was held back for %s goes over its next connection", self._link.member.name)

    def acknowledge(self, connection: Connection) -> None:
        """A large reply came, or many: let their sender forget them soon, if no request follows at once.

        A header acknowledges all before the oldest request that waits. If that waits for long, those behind it must be
        named, or their replies would pile up at the worker."""
        received, self._received = self._received, []
        lowest = self._pending.lowest()
        named = array.array("Q")
        if received and max(received) >= lowest:
            named.extend([request_id for request_id in received if request_id >= lowest])
        try:
            connection.send(NOTICE, 0, lowest, Ack(), named.tobytes(), hold=True)
            self._runtime.delayed_flush.within(LAZY, connection)
        except (OSError, ValueError):
            log.debug("an acknowledgement to %s was not delivered", self._link.member.name)

    # --- completing ---

    def _finish(self, slot: Slot) -> bool:
        """A slot that was taken out of the table has its reply, or its error: wake its caller if that waits.

        Returns whether it has to be completed."""
        slot.done = True
        if trace.recorder is not None:
            trace.recorder.answered(slot)
        wake = slot.wake
        if wake is None:
            return slot.complete is not None
        try:
            wake.release()
        except RuntimeError:  # it woke by itself, at its deadline
            pass
        return slot.complete is not None and not slot.attended

    def complete(self, slots: list[Slot]) -> None:
        """I/O thread, which does not read: complete what was read."""
        for slot in slots:
            complete = slot.complete
            if complete is not None:  # else its caller came for the reply itself, and was first
                complete(slot)

    def _complete_in_person(self, slots: list[Slot], own: Slot) -> None:
        """The same in the thread of a user, which runs nobody's callbacks: those go to the I/O threads. What it has
        come for itself, its `own` if that is attended, it will take."""
        for_others = []
        for slot in slots:
            future = slot.future
            if future is None:
                if slot.attended:
                    if slot is not own:
                        for_others.append(slot)
                    continue
            else:
                future.settling = True  # before looking: see `Future.add_done_callback`
                if future.has_callbacks:
                    future.settling = False
                    for_others.append(slot)
                    continue
            self.complete([slot])
        if for_others:
            self._hand_over(for_others)

    def settle(self, slots: list[Slot]) -> None:
        """Slots that were taken out of the table have an error: their time is up, or the worker is gone."""
        unfinished = [slot for slot in slots if self._finish(slot)]
        if unfinished:
            self._hand_over(unfinished)

    def _hand_over(self, slots: list[Slot]) -> None:
        if self._runtime.closing:  # no thread may be left
            self.complete(slots)
        else:
            self._io_threads.submit(partial(self.complete, slots))


@interruptible
def _acquire(lock: Any, seconds: float) -> bool:
    return lock.acquire(timeout=seconds)  # type: ignore[no-any-return] # typed by what it comes from
