"""A session is the serving end of another worker's link: it takes requests in order, runs them, and sends the replies.

The thread that read a request runs it. It holds the session's turn meanwhile; when it is about to wait, or the timer
finds it stuck, the turn goes to another thread, which serves the requests that came behind. Replies to requests that
arrived together leave together.

A request is run at most once (`at_most_once.py`): one that comes again over a new connection is answered from memory,
or left to the thread that is still running it. The replies are in `answers.py`.
"""

import logging
from collections import deque
from typing import Any, Protocol

from telegrad import trace
from telegrad.cuda import order, reads
from telegrad.errors import ProtocolError
from telegrad.rpc.request import Request
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.answers import MOST_RUNNING, Answers
from telegrad.rpc.server.at_most_once import NEW
from telegrad.rpc.server.function_table import FunctionTable
from telegrad.rpc.server.turn import SessionTurn
from telegrad.rpc.threads.spin import Spinner
from telegrad.rpc.threads.yield_turn import local
from telegrad.rpc.workers import Member
from telegrad.transport.connection import Connection
from telegrad.wire.frames import NOTICE, REQUEST, Frame, encode_whole
from telegrad.wire.messages import DEFINING, WITH_A_CALL, Ack, AnyMessage, CancelCall, Exhausted, Goodbye, Ping

log = logging.getLogger("telegrad.rpc")

_MOST_DEFERRED = 16
_CALLS = WITH_A_CALL | DEFINING
_OF_SESSIONS = frozenset({Ping, Goodbye, Ack})
_HERE = encode_whole(NOTICE, 0, 0, Ping())


class SessionEvents(Protocol):
    """Whom a session tells what happens to it."""

    def session_active(self) -> None:
        """A thread serves a session: somebody should see that it does not keep it for long."""

    def session_paused(self, session: "Session") -> None:
        """So much of a caller's is running that no more of it is read."""

    def session_lost(self, session: "Session") -> None:
        """The connection of a session ended."""

    def caller_said_goodbye(self, member: Member, ending: str) -> None:
        """The caller leaves on purpose."""


class Session(Answers):
    """Requests of one incarnation of one worker, over one of its links."""

    _turn: SessionTurn | None

    def __init__(
        self,
        runtime: Runtime,
        events: SessionEvents,
        member: Member,
        main_by_value: bool,
        number: int = 0,
        ticket: bytes = b"",
    ) -> None:
        super().__init__(runtime, member)
        self._io_threads = runtime.io_threads
        self._events = events
        self._served = runtime.layers.served
        self._before = runtime.layers.before_serving
        self.ticket = ticket  # whoever goes on with this session over another connection must show it
        self.number = number  # of the link, at the caller
        self.main_by_value = main_by_value
        self.functions = FunctionTable(member.name, exports_only=self.plain)
        self._deferred: deque[Frame] = deque()  # notices to be served when no request waits
        self._spinner = Spinner()
        self.closed = False  # its caller is gone for good: nobody will ask for the replies that are kept

    def __repr__(self) -> str:
        return f"<Session of {self.member.name!r}: {self.running} running>"

    def waiting_requests(self) -> list[Frame]:
        """Those that have come and not begun."""
        return [frame for frame in list(self._inbox) if frame.kind == REQUEST]

    def attach(self, connection: Connection) -> None:
        """Serve this connection, the first one or one that replaces a lost one."""
        with self._lock:
            old, self.connection = self.connection, connection
        if old is not None:
            self._detach(old)
        connection.on_blocked = self._writing_waits
        self._runtime.delayed_flush.look_after(connection)
        connection.copier.ask_for_help = self._runtime.helpers.ask
        self._io_threads.register(connection.stream.fileno(), self.ready, armed=True)

    # --- serving ---

    def ready(self) -> None:
        """The I/O threads: there is something to read, or to go on with."""
        turn = SessionTurn(self)
        with self._lock:
            connection = self.connection
            if self._turn is not None or connection is None:
                return
            self._turn = turn
        local.turn = turn
        self._events.session_active()
        try:
            self._serve(turn, connection)
        finally:
            local.turn = None

    def _serve(self, turn: SessionTurn, connection: Connection) -> None:
        inbox, running = self._inbox, self.requests.running
        look, stream, io_threads = self._spinner.wait, connection.stream, self._io_threads
        has_come = not inbox  # the event that this thread was woken by
        while True:
            while inbox:
                # So much that no more is read: the socket fills, and the caller waits as for a slower worker.
                if len(running) >= MOST_RUNNING:
                    self.paused = True
                    break
                try:
                    self.take(inbox.popleft(), turn)
                except ProtocolError as error:
                    self._break_off(connection, error)
                    return
                with self._lock:
                    turn.frame = None
                    if self._turn is not turn:
                        return  # another thread went on while this one was busy
            if self.paused:
                self.mention(Exhausted(0, len(running)))
                self._events.session_paused(self)
                turn.give_up()
                return
            try:
                if (turn.owes or self._deferred) and not self._catch_up(turn, connection):
                    return
                # Looked at before it is read: usually nothing is there yet, and reading would raise that. Not while
                # other threads work: to look is to let go of the interpreter, and to wait for it again.
                others_work = io_threads.working > 1 and not stream.pending and stream.held is None
                if not has_come and (others_work or not look(stream.readable, io_threads)):
                    turn.give_up()
                    return
                has_come = False
                frames = connection.receive()
            except (OSError, ValueError):
                frames = None
            except ProtocolError as error:
                self._break_off(connection, error)
                return
            if frames is None:
                if self._turn is turn:  # else the thread that reads now finds the same
                    self.ended(connection)
                return
            if trace.recorder is not None:
                trace.recorder.arrived(frames)
            if len(frames) > 1:
                self._cancel_ahead(frames)
            inbox.extend(frames)

    def _catch_up(self, turn: SessionTurn, connection: Connection) -> bool:
        """If nothing more has come, write the replies that were held back and serve the notices that were deferred.
        False if that took long: another thread reads now."""
        if not connection.stream.readable(0):
            if turn.owes:
                turn.owes = False  # lazy replies have their own time, but go along
                connection.flush()
            if self._deferred:
                self.serve_deferred(turn)
        return self._turn is turn

    def _cancel_ahead(self, frames: list[Frame]) -> None:
        """A call that came together with word that nobody waits for it never begins."""
        for frame in frames:
            if type(frame.message) is CancelCall:
                self.cancelling().ask(frame.message.request_id)  # forgotten when that notice is served, at the latest

    def serve_deferred(self, turn: SessionTurn) -> None:
        """Serve the notices that waited until no request does."""
        deferred = self._deferred
        while deferred:
            try:
                turn.frame = frame = deferred.popleft()
            except IndexError:  # another thread was first
                break
            if self.requests.is_news(frame.request_id):
                self.serve(Request(self, frame))
        with self._lock:
            turn.frame = None

    def serve(self, request: Request) -> None:
        """Give a request to the handler of its message. Whatever goes wrong there is the reply."""
        if trace.recorder is not None and request.frame.read_at:
            trace.recorder.serve(request, self.serve)
            return
        message = request.message
        served = self._served.get(type(message))
        try:
            if self._before is not None and message is request.frame.message:  # once: a layer unwraps and serves on
                self._before(request)
            if served is None:
                raise ProtocolError(f"worker {self.info.name!r} has no use for a {type(message).__name__}")
            handler, deferrable, counts_as_work = served
            if counts_as_work:
                self._runtime.calls_served += 1
                # What frees memory asks nothing of the GPU. A lane for it would be the last one used, and the next
                # request of this caller would not be on the one where it has worked before.
                if order.active and not deferrable:
                    reads.run_on_lane(handler, request, request.frame.arrived)
                    return
            handler(request)
        except BaseException as error:  # also an exit or an interrupt: it ends the call, not the thread that served it
            request.fail(error)

    def serve_inner(self, request: Request) -> None:
        """Serve the message that a layer found within the one it was given: what it raises is for that layer's call."""
        served = self._served.get(type(request.message))
        if served is None:
            raise ProtocolError(f"worker {self.info.name!r} has no use for a {type(request.message).__name__}")
        served.handler(request)

    def has_more(self, turn: SessionTurn) -> bool:
        """Whether the thread of this turn will go on with what has come meanwhile."""
        return bool(self._inbox) and self._turn is turn

    def give_up(self, turn: SessionTurn) -> None:
        """Let another thread serve: at once if requests are waiting here, else when one comes."""
        self._hand_over(turn)

    def _hand_over(self, turn: SessionTurn, during: Frame | None = None) -> None:
        """The same, but only while this frame is being taken, if one is given. Any thread, the timer's as well: nothing
        here waits."""
        with self._lock:
            if self._turn is not turn or (during is not None and turn.frame is not during):
                return
            self._turn = None
        connection = self.connection
        if connection is None:
            return
        if turn.owes:
            connection.flush()
        held = connection.stream.held
        if self.paused:
            self._resume()
        # What came over other streams before this turn was free has found it taken.
        elif self._inbox or self._deferred or (held is not None and held.is_set()):
            self._io_threads.submit(self.ready)
        else:
            self._io_threads.arm(connection.stream.fileno())

    def _resume(self) -> None:
        """Go on reading if there is room again."""
        with self._lock:
            resumes = self.paused and self._turn is None and self.running < MOST_RUNNING
            if resumes:
                self.paused = False
        if resumes:
            self.mention(Exhausted(0, 0))
            self._io_threads.submit(self.ready)

    def relieve(self) -> bool | None:
        """The timer: if the same request has been running since the last look, let another thread serve.

        Returns whether that was so; None if no thread serves at all."""
        turn = self._turn
        if turn is None:
            return None
        frame = turn.frame
        stuck = frame is not None and turn.seen is frame
        turn.seen = frame
        if stuck:
            self._hand_over(turn, during=frame)
        return stuck

    def sleeping(self, change: int) -> None:
        """A thread that serves this session begins (+1) or ends (-1) to wait for somebody else."""
        self._io_threads.sleeping(change)

    def _writing_waits(self) -> None:
        """This thread cannot write on, or not yet."""
        turn = self._turn
        if turn is not None and local.turn is turn:
            self._hand_over(turn)

    def take(self, frame: Frame, turn: SessionTurn) -> None:
        """Serve one frame of the caller. ProtocolError if it asks for more than it may."""
        requests = self.requests
        if frame.ack > requests.acknowledged:
            requests.acknowledge(frame.ack)
        message = frame.message
        if frame.kind == NOTICE:
            turn.frame = frame
            self._take_notice(frame, message)
            return
        kind = type(message)
        if kind in _CALLS:
            # A function is defined before anything else, in the order of arrival: the next call may have its number
            # alone and run first, in another thread, and this one may be refused.
            call: Any = message
            while type(call) in WITH_A_CALL:
                call = call.call
            if type(call) in DEFINING and call.definition:
                self.functions.note(call)
        reply = requests.take(frame.request_id, kind)
        # From now on the next one may be served before this one is done, and if it cancels this one that is known.
        turn.frame = frame
        if reply is NEW:
            self.serve(Request(self, frame))
        elif reply is not None:
            self._send_again(reply)

    def _take_notice(self, frame: Frame, message: AnyMessage) -> None:
        kind = type(message)
        if kind in _OF_SESSIONS:
            self._take_word(frame, message)
            return
        # One that may be deferred came with the next request, which should not wait for it.
        served = self._served.get(kind)
        if served is not None and served.deferrable and len(self._deferred) < _MOST_DEFERRED:
            self._deferred.append(frame)
        elif self.requests.is_news(frame.request_id):
            self.serve(Request(self, frame))

    def _take_word(self, frame: Frame, message: AnyMessage) -> None:
        """What a caller says about the session itself."""
        if type(message) is Ping:
            self._send_again(_HERE)
        elif type(message) is Goodbye:
            self._events.caller_said_goodbye(self.member, message.ending)
        else:  # an Ack: it has said most by its header
            self.requests.acknowledge_named(_numbers(frame.payload))

    # --- the end ---

    def _break_off(self, connection: Connection, error: ProtocolError) -> None:
        """The caller sends nonsense, or more than it may."""
        self._runtime.warnings.warning("closing a connection of %s: %s", self.member.name, error)
        self._inbox.clear()
        self.ended(connection)

    def ended(self, connection: Connection) -> None:
        """A connection of the caller ended."""
        with self._lock:
            self._turn = None
            current = self.connection is connection
            if current:
                self.connection = None
            newer = self.connection
        self._detach(connection)
        if newer is not None:  # it came while this thread was busy with the old one, and its first event found no taker
            newer.flush()  # replies that this thread held back
            self._io_threads.arm(newer.stream.fileno())
        if current:
            self._events.session_lost(self)

    def _detach(self, connection: Connection) -> None:
        with self._lock:
            if not connection.closed:  # once only: the number of its descriptor may be another's by now
                self._io_threads.forget(connection.stream.fileno())
                connection.close()

    def close(self) -> None:
        """Stop serving; what is running goes on, its reply is dropped."""
        self.closed = True
        connection, self.connection = self.connection, None
        if connection is not None:
            self._detach(connection)


def _numbers(payload: Any) -> Any:
    """The request ids in the payload of an acknowledgement."""
    whole = len(payload) // 8 * 8
    return memoryview(payload)[:whole].cast("B").cast("Q") if whole else ()
