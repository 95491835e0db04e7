"""How a link gets its connection, and the next one when that is lost.

Whoever needs the connection first dials; others wait for that. What was sent and not answered is sent again over the
next connection before anything else: the worker knows by the ids what it has already taken.
"""

import os
import threading
import time
from collections import deque
from threading import get_ident
from typing import Any

from telegrad.cuda import order
from telegrad.errors import ProtocolError, TelegradError, WorkerDied
from telegrad.rpc.client.completion import Completion
from telegrad.rpc.client.outcomes import OWN_END, LinkEvents, Unanswered, died_meanwhile, does_not_answer
from telegrad.rpc.client.pending import FOREVER, Pending, Slot
from telegrad.rpc.client.reply_reader import ReplyReader
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import TICKET_BYTES
from telegrad.wire.frames import NOTICE, REQUEST
from telegrad.wire.messages import AnyMessage, Ping

_TELLING_SECONDS = 2.0  # to read in the rendezvous store what ended a worker, and to tell of it
KEPT_NOTICES = 256  # the latest, to be sent again over a new connection; a session remembers more than that


class Connecting:
    """The connection of a link to one incarnation of one worker, and all that outlives it."""

    replies: ReplyReader  # of the whole link, which has more that this needs

    def __init__(self, runtime: Runtime, events: LinkEvents, member: Member, number: int) -> None:
        self.runtime = runtime
        self._events = events
        self.member = member
        self.number = number
        self.ticket = os.urandom(TICKET_BYTES)  # shown with each connection: nobody else can go on with this link
        self.pending = Pending()
        self.completion = Completion(runtime)
        self.main_by_value = False
        self.dead: WorkerDied | None = None
        self.current: Connection | None = None  # what is sent goes over it; `connection()` makes it
        self.settled = threading.Event()  # clear while a lost connection is neither replaced nor given up
        self.settled.set()
        self._notices: deque[tuple[int, AnyMessage]] = deque(maxlen=KEPT_NOTICES)
        self._dial_lock = threading.Lock()
        self._finder = 0  # the thread that found that nobody answers any more

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self.current is not None

    @property
    def dialling(self) -> bool:
        """Whether a thread is making a connection, or giving one up."""
        return self._dial_lock.locked()

    def connection(self, deadline: float = FOREVER) -> Connection:
        """The connection, made if there is none yet. TimeoutError at the deadline, WorkerDied if nobody answers."""
        connection = self.current
        if connection is not None:
            return connection
        dialled = self._current_or_dialled(deadline) if self.dead is None else None
        if dialled is None:
            raise self._death_as_told(deadline)
        if not isinstance(dialled, Unanswered):
            return dialled
        if dialled.gone:
            try:
                self._events.unanswered(self.member, f"worker {self.member.name!r} is gone: {dialled.why}")
            finally:
                self.settled.set()
            raise self.dead.again() if self.dead is not None else does_not_answer(self.member, dialled)
        raise does_not_answer(self.member, dialled)

    def _current_or_dialled(self, deadline: float) -> Connection | Unanswered | None:
        """The same, with what it was if nobody answered; None if another thread has found the worker dead."""
        with blocking():
            left = -1.0 if deadline == FOREVER else max(0.0, deadline - time.monotonic())
            if not self._dial_lock.acquire(timeout=left):
                raise TimeoutError(f"worker {self.member.name!r} is still being dialled")
            try:
                if self.dead is not None:
                    return None
                dialled = self.current if self.current is not None else self._dial(deadline)
                if isinstance(dialled, Unanswered) and dialled.gone:
                    # At once: those who wait for the lock need not dial as well.
                    self.settled.clear()
                    self._finder = get_ident()
                    self.dead = does_not_answer(self.member, dialled)
                return dialled
            finally:
                self._dial_lock.release()

    def _death_as_told(self, deadline: float) -> WorkerDied:
        """The error of a worker that is dead. Who has just found that out asks what ended it, and tells all of this
        agent; so whoever is told here finds it known everywhere else."""
        if self._finder != get_ident() and not self.settled.is_set():
            with blocking():
                self.settled.wait(max(0.0, min(deadline - time.monotonic(), _TELLING_SECONDS)))
        assert self.dead is not None
        return self.dead.again()

    def _dial(self, deadline: float) -> Connection | Unanswered:
        """Dial, and send what may not have arrived: the worker knows by the ids what it has already taken."""
        # Not for longer than a silent worker is waited for: the lock held here is needed to give it up.
        limit = time.monotonic() + self.runtime.patience
        while True:
            dialled = self._events.dial(self, deadline)
            if isinstance(dialled, Unanswered):
                return dialled
            connection, self.main_by_value = dialled.connection, dialled.main_by_value
            self.runtime.delayed_flush.look_after(connection)  # before anything is sent that may find no room
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
        self.replies.receiver.last_heard = time.monotonic()
        connection.after_hold = self.replies.arm_if_awaited
        self.replies.receiver.attach(connection)
        connection.copier.ask_for_help = self.runtime.helpers.ask
        self.runtime.reply_events.register(connection.stream.fileno(), self.replies)
        self.current = connection  # only now may others send: what came before is on its way
        self.settled.set()
        return connection

    def _send_again(self, connection: Connection, deadline: float) -> None:
        if order.active and self.pending:
            order.synchronize()  # this thread's streams are not those the tensors were made on
        for number, notice in list(self._notices):
            connection.send(NOTICE, number, 0, notice, deadline=deadline)
        waiting = self.pending.snapshot()  # before those that were given up: who leaves one table is in the other
        for request_id in self.pending.overdue():
            self._ask_after(connection, request_id, deadline)
        for slot in waiting:
            if slot.request_id in self.pending.slots:
                connection.send(REQUEST, slot.request_id, 0, *slot.whole(), deadline=deadline)
            elif self.pending.was_given_up(slot.request_id):  # meanwhile, and its tensors may have changed
                self._ask_after(connection, slot.request_id, deadline)

    def _ask_after(self, connection: Connection, request_id: int, deadline: float) -> None:
        """Send what stands for a request that was given up."""
        # Layers above want to hear of replies that come too late. Under the number of a request that was taken this is
        # no new one: its reply comes again. One that was lost is answered as what this is.
        connection.send(REQUEST, request_id, 0, Ping(), deadline=deadline)
        # Nor is this run, under a number that was taken; but what it defines is known from then on, to those that
        # follow.
        if (call := self.pending.definition_in(request_id)) is not None:
            connection.send(REQUEST, request_id, 0, call, deadline=deadline)

    def _send_over_next(self, old: Connection, *frame: Any) -> None:
        """What was sent over `old` as that ended is lost, unless the next dial is still to come and sends it again."""
        with self._dial_lock:
            connection = self.current
        if connection is not None and connection is not old:
            try:
                connection.send(*frame)
            except (OSError, ValueError):
                self.lost(connection)

    # --- losing it ---

    def said_goodbye(self, ending: str) -> None:
        """The worker leaves on purpose, or its program ended."""
        self._events.said_goodbye(self.member, ending)

    def lost(self, connection: Connection) -> None:
        """The connection ended. Dial again at once: a living worker answers, a dead one refuses."""
        with self._dial_lock:
            if self.current is not connection:
                return  # another thread noticed first
            self.runtime.reply_events.forget(connection.stream.fileno())
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
                self.runtime.reply_events.forget(connection.stream.fileno())
                connection.close()
                self.current = None
        waiting = self.pending.take_all()
        for slot in waiting:
            slot.error = ProtocolError(f"worker {self.member.name!r} broke the protocol during {slot.what()}: {error}")
        self.completion.settle(waiting)

    def fail(self, error: WorkerDied) -> None:
        """The worker is gone for good."""
        with self._dial_lock:
            self.dead = error
            connection, self.current = self.current, None
        if connection is not None:
            self.runtime.reply_events.forget(connection.stream.fileno())
            connection.close()
        waiting = self.pending.take_all()
        for slot in waiting:
            slot.error = self.died(slot)
        self.completion.settle(waiting)
        self.pending.forget_given_up()
        self.settled.set()

    def close(self) -> None:
        """End the link from this side; what still waits is told so."""
        self.fail(WorkerDied(f"{OWN_END}; nothing more can be asked of {self.member.name!r}."))

    def died(self, slot: Slot) -> WorkerDied:
        """What a caller gets whose worker is gone."""
        assert self.dead is not None
        return died_meanwhile(slot, self.member, self.dead)
