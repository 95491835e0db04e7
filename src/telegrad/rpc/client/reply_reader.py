"""Who reads the replies of a link.

The thread that waits for a reply reads it itself: no other thread has to wake up for it. While one thread reads, others
that wait on the same link sleep; the reader hands on the reading when its own reply is there, and then completes what
it read for others (`completion.py`). Replies that no thread waits for (futures) are read by the I/O threads.

    IDLE      nothing is expected, or nobody looks
    ARMED     the kernel tells the I/O threads when a reply comes
    READING   a thread reads
"""

import threading
import time
from collections import deque
from typing import Any, Protocol

from telegrad.errors import RpcTimeout
from telegrad.rpc.client.completion import Completion, wake
from telegrad.rpc.client.pending import FOREVER, Pending, Slot
from telegrad.rpc.client.receiving import Receiver, ReceivingLink
from telegrad.rpc.threads.delayed_flush import BURST
from telegrad.rpc.threads.interrupts import interruptible
from telegrad.rpc.threads.spin import Spinner
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.transport.connection import Connection
from telegrad.transport.stream import SocketStream

IDLE, ARMED, READING = "idle", "armed", "reading"
BURST_CALLS = 16  # calls in flight from which on small ones may wait a moment to share a write
_LOOK_AGAIN_SECONDS = 1.0
_MOST_READ = 256  # replies after which a reader hands on the reading, though more have come, to complete these


class ReadLink(ReceivingLink, Protocol):
    """The link whose replies are read, as far as the reader needs it."""

    pending: Pending
    completion: Completion
    current: Connection | None
    settled: threading.Event

    def timeout_error(self, slot: Slot, *, ask: bool = False) -> RpcTimeout:
        """What a caller gets whose deadline passed."""

    def stopped_waiting(self, slot: Slot) -> None:
        """The caller of this request waits no more: its deadline has passed, or it was interrupted."""


class ReplyReader:
    """The reading end of a link."""

    def __init__(self, link: ReadLink) -> None:
        self._link = link
        self._io_threads = link.runtime.io_threads
        self._events = link.runtime.reply_events
        self._pending = link.pending
        self._slots = link.pending.slots
        self._completion = link.completion
        self.receiver = Receiver(link)
        self._receive = self.receiver.receive
        self.state = IDLE
        self.last_asked = 0.0  # when a call was held back in a burst
        self._postponed = False  # whether the I/O threads are to look once that burst is over
        self._lock = threading.Lock()
        self._waiters: deque[Slot] = deque()
        self._spinner = Spinner()

    # --- waiting ---

    def wait(self, slot: Slot) -> None:
        """Return when `slot` is done; raises RpcTimeout at its deadline, unless `slot.complete` takes the error."""
        try:
            while not slot.done:
                with self._lock:
                    reads = self.state is not READING
                    if reads:
                        if self.state is ARMED:
                            self._disarm()
                        self.state = READING
                    elif not self._queue(slot):
                        return  # completed before there was a lock to release
                if reads:
                    self._read_until_done(slot)
                else:
                    self._sleep_until_woken(slot, slot.deadline)
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
                self._disarm()
            self.state = READING
        read: list[Slot] = []
        came = False
        try:
            ready = connection.stream.readable
            came = self._spinner.wait(ready, self._io_threads) or ready(seconds)
            if came:
                self._receive(connection, read)
        finally:
            self._end(read, slot)
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
        if self._pending.give_up(slot.request_id) is None:  # another thread is about to complete it, as late or not
            with self._lock:
                sleeps = self._queue(slot)
            if sleeps:
                self._sleep_until_woken(slot, FOREVER)
            return
        slot.done = True
        with self._lock:
            if self.state is IDLE:  # the reading may have been passed to this thread as it woke by itself
                self._pass_on()
        error = self._link.timeout_error(slot, ask=True)  # before the worker is told to give it up
        self._link.stopped_waiting(slot)
        if slot.complete is None:
            raise error
        slot.error = error  # its future says so, now and whenever it is asked again
        slot.complete(slot)

    def _abandon(self, slot: Slot) -> None:
        if not slot.done and slot.complete is None and self._pending.give_up(slot.request_id) is not None:
            slot.done = True
            self._link.stopped_waiting(slot)
        with self._lock:
            if slot in self._waiters:
                self._waiters.remove(slot)
            if self.state is IDLE:  # the reading may have been passed to this thread
                self._pass_on()

    def _sleep_until_woken(self, slot: Slot, until: float) -> None:
        left = -1.0 if until == FOREVER else max(0.0, until - time.monotonic())
        with blocking():
            woken = _acquire(slot.wake, left)
        if woken and slot.done:
            wake(slot)  # several threads may wait for one future: each wakes the next
        with self._lock:
            if slot in self._waiters:
                self._waiters.remove(slot)
            if slot.done and self.state is IDLE:  # the reading may have been passed to this thread as it was done
                self._pass_on()

    def _read_until_done(self, slot: Slot) -> None:
        """Read until `slot` is done, or others are that have to be completed; hand on the reading, and complete."""
        read: list[Slot] = []
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
                if not self._spinner.wait(connection.stream.readable, self._io_threads):
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
            self._end(read, slot)

    # --- whose turn it is ---

    def _disarm(self) -> None:
        """Under the lock: a thread reads itself what the I/O threads look for."""
        connection = self._link.current
        if connection is not None:
            self._events.disarm(connection.stream.fileno())

    def _end(self, read: list[Slot], own: Slot) -> None:
        """This thread, which waits for `own`, reads no more: hand on the reading, then complete what it has read."""
        with self._lock:
            self.state = IDLE
            if self._waiters or self._slots or self._pending.given_up:
                self._pass_on()
        if read and (read[-1] is not own or len(read) > 1 or not own.attended):  # else it takes that itself
            self._completion.by_caller(read, own)

    def _pass_on(self) -> None:
        """Under the lock: let one who waits read, or the I/O threads if others wait for futures only."""
        while self._waiters:
            heir = self._waiters.popleft()
            if not heir.done:
                wake(heir)
                return
        waiting = len(self._slots)
        connection = self._link.current
        if connection is None or not (waiting or self._pending.given_up):
            return
        if waiting > BURST_CALLS and time.monotonic() - self.last_asked < BURST:
            self._postponed = True  # calls keep coming: read their replies together
            connection.flush_within(BURST)
        else:
            self.state = ARMED
            self._postponed = False
            self._events.arm(connection.stream.fileno(), alone=bool(connection.reserved))

    def arm(self) -> None:
        """Have the I/O threads look for replies, unless a thread reads already."""
        with self._lock:
            connection = self._link.current
            if self.state is IDLE and connection is not None:
                self.state = ARMED
                self._postponed = False
                self._events.arm(connection.stream.fileno(), alone=bool(connection.reserved))

    def arm_if_awaited(self) -> None:
        """What was held back has been written: notices, which have no reply, or requests as well."""
        if self._postponed or self._pending.given_up or self._pending.any_unattended():
            self.arm()

    def disarmed(self) -> None:
        """The connection is lost: no more events of it. A thread that reads goes on with the next."""
        with self._lock:
            if self.state is ARMED:
                self.state = IDLE

    def readable(self) -> None:
        """I/O thread: a reply came, or the worker ended while nothing was expected of it."""
        self.complete(self.gather(alone=True), alone=True)

    def gather(self, alone: bool = False) -> list[Slot]:
        """I/O thread: read what came; the slots that are to be completed. With other links behind it, not the whole of
        a large answer, which may keep coming as fast as it is read: it gets a thread that is `alone` with it."""
        with self._lock:
            connection = self._link.current
            if self.state is READING or connection is None:
                return []
            self.state = READING
        read: list[Slot] = []
        try:
            self._receive(connection, read)
            while len(read) < _MOST_READ and not connection.closed and connection.stream.readable(0):
                if connection.reserved and not alone:
                    break
                self._receive(connection, read)
        finally:
            with self._lock:
                self.state = IDLE
                self._pass_on()
                if self.state is IDLE and self._link.current is connection:
                    # The event that woke the I/O threads is spent: have the kernel tell of the worker's end again.
                    self._events.disarm(connection.stream.fileno())
        return read

    def complete(self, gathered: list[Slot], alone: bool) -> None:
        """I/O thread: complete what was gathered; with answers of other links behind it, nothing that may take long."""
        if alone:
            self._completion.by_io_thread(gathered)
        else:
            self._completion.by_caller(gathered, None)


# Where a caller reads in person it waits here; the reading is passed on whatever comes of it.
interruptible(SocketStream.readable)


@interruptible
def _acquire(lock: Any, seconds: float) -> bool:
    return lock.acquire(timeout=seconds)  # type: ignore[no-any-return] # typed by what it comes from
