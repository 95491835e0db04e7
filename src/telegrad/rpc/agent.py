"""The agent of one worker: it owns the threads, the links to other workers and the sessions of theirs.

It moves messages and knows none of their meanings: layers above register a handler for each message they define, hooks
that see every call going out, and functions to call when a worker is lost.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from telegrad.errors import AuthenticationError, NotInitialized, ProtocolError, UnknownWorker, WorkerDied
from telegrad.ids import Incarnation, WorkerId, generation_of
from telegrad.rpc.crew import Crew
from telegrad.rpc.devices import place
from telegrad.rpc.dialling import Acceptor, dial, main_fingerprint
from telegrad.rpc.flusher import Flusher
from telegrad.rpc.futures import Future
from telegrad.rpc.health import REDIAL_SECONDS, Health
from telegrad.rpc.keeper import Keeper
from telegrad.rpc.link import Link
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.packing import discard, take_back, unpack_from
from telegrad.rpc.pending import FOREVER, Slot
from telegrad.rpc.remote_errors import describe_exception, rebuild_exception
from telegrad.rpc.rendezvous import MeetingPlace
from telegrad.rpc.session import NO_WORK, Request, Session
from telegrad.rpc.workers import Directory, Member, WorkerInfo
from telegrad.transport.addresses import Listeners
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import Hello, Refused, Welcome
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.messages import AnyMessage, ExceptionReply, Goodbye
from telegrad.wire.tensors import describe, rebuild

if TYPE_CHECKING:
    from telegrad.rpc.caretaker import Caretaker

log = logging.getLogger("telegrad.rpc")
# Of functions called from elsewhere; their callers are told anyway.
failures = logging.getLogger("telegrad.rpc.failures")

Handler = Callable[[Request], None]


class OnReply(Protocol):
    """What a layer above does about the reply of a call it wrapped. Called once, or never if the call fails."""

    def __call__(self, message: AnyMessage, tensors: list[torch.Tensor]) -> tuple[AnyMessage, list[torch.Tensor]]:
        """The reply came: the inner reply, and the tensors to unpack it with."""

    def unsent(self) -> None:
        """The call did not leave this worker."""


# Sees a call going out, with its tensors; returns the wrapped call and what to do with the reply, or None.
CallHook = Callable[[WorkerId, AnyMessage, list[torch.Tensor]], tuple[AnyMessage, OnReply] | None]

_NOTHING = Packed(b"", [])


class Agent:
    """One worker's end of everything. Several agents can live in one process; `rpc` holds the current one."""

    def __init__(
        self,
        member: Member,
        secret: bytes,
        options: RpcBackendOptions,
        listeners: Listeners,
        place: MeetingPlace | None = None,
    ) -> None:
        self.member = member
        self.info = member.info
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.directory = Directory()
        self.directory.update([member])
        self.place = place
        self.caretaker: Caretaker | None = None
        self.crew = Crew(f"telegrad-{member.name}", options.num_worker_threads)
        self.keeper = Keeper(f"telegrad-{member.name}")
        self.handlers: dict[type[Any], Handler] = {}
        self.flusher = Flusher(self.keeper)
        self.health = Health(self)
        self.call_hooks: list[CallHook] = []
        self.on_late_reply: list[Callable[[Frame, WorkerId], None]] = []
        self.on_discard: list[Callable[[Any, list[torch.Tensor]], None]] = []  # a payload that cannot be unpacked
        self.on_death: list[Callable[[Member], None]] = []
        self.extensions: dict[type[Any], Any] = {}  # what layers above keep for this agent
        self.before_shutdown: list[Callable[[], None]] = []
        self.on_close: list[Callable[[], None]] = []
        # What layers wait for, beside requests: each in words, with the id of the worker that can end it, or -1.
        self.wait_sources: list[Callable[[], list[tuple[str, int]]]] = []
        self.missing_at: Callable[[str], list[str]] = lambda _: []
        self.world_size: int | None = None
        # What is done with records of members, whichever thread reads them.
        self.take_news: Callable[[list[Member]], None] = self.learn
        # What is done to each connection this worker dials; tests put faults there.
        self.fit_out: Callable[[Connection], Connection] = lambda connection: connection
        self.event_loop: Any = None  # for coroutines; made by the first
        self.calls_made = 0
        self.calls_served = 0
        self.closing = False
        self._secret = secret
        self._main = main_fingerprint()
        self._lock = threading.Lock()
        self._links: dict[WorkerId, Link] = {}
        self._link_numbers = 0
        self._sessions: dict[tuple[int, int, int], Session] = {}
        self._dead: dict[int, WorkerDied] = {}  # by incarnation
        self._acceptor = Acceptor(listeners, secret, options, self.crew, self.keeper, self._admit, self._admitted)

    def __repr__(self) -> str:
        return f"<Agent {self.info.name!r}: {len(self._links)} links, {len(self._sessions)} sessions>"

    def start(self) -> None:
        """Start the threads and begin to accept connections."""
        self.crew.start()
        self.keeper.start()
        self._acceptor.start()

    # --- who ---

    def find(self, to: str | int | WorkerInfo) -> Member:
        """The member meant by a name, an id or a WorkerInfo; asks the meeting place about one it is not linked with."""
        member = self._known(to)
        if (member is None or self._linked(member) is None) and self.place is not None and not self.closing:
            self.look_for_news()  # it may be new, or have been started again
            member = self._known(to)
        if member is None:  # one that left is known to be dead: whatever is asked of it says so
            member = self.directory.who_left(to.name if isinstance(to, WorkerInfo) else to)
        if member is None:
            raise self.directory.unknown(to)
        return member

    def _known(self, to: str | int | WorkerInfo) -> Member | None:
        if isinstance(to, str):
            return self.directory.by_name(to)
        if isinstance(to, WorkerInfo):
            member = self.directory.by_id(to.id)
            return member if member is not None and member.name == to.name else None
        if isinstance(to, int) and not isinstance(to, bool):
            return self.directory.by_id(to)
        raise UnknownWorker(
            f"Cannot get WorkerInfo from name {to!r}: a worker is named by its name, its rank or its WorkerInfo"
        )

    def look_for_news(self) -> None:
        """Read what others published since the last time."""
        if self.place is None:
            return
        try:
            self.place.news(self.take_news)
        except RuntimeError as error:
            log.debug("the meeting place does not answer: %s", error)

    def learn(self, members: Sequence[Member]) -> None:
        """Take in records of members."""
        for gone in self.directory.update(members):
            if gone.incarnation == self.member.incarnation:
                continue
            if self.directory.has_left(gone):
                self._leaves(gone, f"worker {gone.name!r} has left")
            else:
                self.lost(gone, f"worker {gone.name!r} was started again")

    def wait_for_return(self, member: Member, seconds: float) -> None:
        """Wait until a worker that died is back under its name; raises what ended it at the deadline."""
        deadline = time.monotonic() + seconds
        while True:
            self.look_for_news()
            known = self.directory.by_name(member.name)
            if known is not None and known.incarnation != member.incarnation:
                return
            if time.monotonic() >= deadline or self.closing:
                raise WorkerDied(
                    f"worker {member.name!r} ended and was not started again within {seconds:g} s.",
                    worker=member.name,
                    incarnation=member.incarnation,
                )
            time.sleep(0.02)

    # --- links ---

    def link(self, member: Member) -> Link:
        """The link to this incarnation of a worker."""
        link = self._links.get(member.worker_id)
        if link is not None and link.member.incarnation == member.incarnation:
            return link
        if self.closing:
            raise NotInitialized(
                f"worker {self.info.name!r} is shutting down; nothing can be asked of {member.name!r} now"
            )
        if link is not None:  # two have this id: the one started first is gone, whatever was still expected of it
            first = min(link.member, member, key=lambda m: generation_of(m.incarnation))
            self.lost(first, f"worker {first.name!r} was started again")
        with self._lock:
            link = self._links.get(member.worker_id)
            if link is None or link.member.incarnation != member.incarnation:
                self._link_numbers += 1
                new = Link(self, member, self._link_numbers)
                new.dead = self._dead.get(member.incarnation)
                if link is None or new.dead is None:
                    self._links[member.worker_id] = new
                link = new
            return link

    def _linked(self, member: Member) -> Link | None:
        """The link to this incarnation of a worker if it is connected: then the worker's end will show there."""
        link = self._links.get(member.worker_id)
        connected = link is not None and link.connected and link.member.incarnation == member.incarnation
        return link if connected else None

    def dial(
        self, member: Member, number: int, on_blocked: Callable[[], None], deadline: float
    ) -> tuple[Connection, bool]:
        """A new connection for a link, and whether functions of `__main__` must be sent whole over it.

        WorkerDied if the worker does not answer, TimeoutError at the deadline of whoever asked for the connection."""
        hello = Hello(
            self.member.worker_id,
            self.info.name,
            self.member.incarnation,
            member.incarnation,
            number,
            self.options.shared_memory,
            self._main,
            self.options.max_message_bytes,
        )
        last_try = time.monotonic() + self.options.connect_timeout
        while True:
            limit = min(deadline, last_try, time.monotonic() + self.health.patience)
            try:
                connection, welcome = dial(member, hello, self._secret_of(member), self.options, limit, on_blocked)
            except Refused as error:
                raise self.health.unreachable(member, error) from error
            except (AuthenticationError, ProtocolError) as error:
                raise type(error)(f"connecting to worker {member.name!r}: {error}") from error
            except WorkerDied:
                raise
            except OSError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(f"worker {member.name!r} could not be reached in time: {error}") from error
                if now >= last_try or self.is_dead(member) or not self.health.may_answer_yet(member, error):
                    raise self.health.unreachable(member, error) from error
                time.sleep(REDIAL_SECONDS)
            else:
                return self.fit_out(connection), welcome.main_module != self._main

    def _secret_of(self, member: Member) -> bytes:
        """The job's secret; where none was given, the one that the worker has published where all meet."""
        return self._secret if self.options.secret is not None else member.secret or self._secret

    def links(self) -> list[Link]:
        """All links there are."""
        with self._lock:
            return list(self._links.values())

    def sessions(self) -> list[Session]:
        """All sessions there are."""
        with self._lock:
            return list(self._sessions.values())

    # --- asking ---

    def send(
        self,
        member: Member,
        message: AnyMessage,
        packed: Packed = _NOTHING,
        *,
        timeout: float,
        what: Callable[[], str],
        complete: Callable[[Slot], None] | None = None,
        future: Future[Any] | None = None,
        definition: bytes = b"",
        attended: bool = False,
    ) -> Slot:
        """Send a request; its slot is completed by `complete`, or waited for with `wait`, or both if `attended`.

        `definition` is that of the function the message calls by its number."""
        tensors, segments = describe(packed.tensors) if packed.tensors else ((), ())
        if tensors:
            tensors = place(self.options, self.info.name, member, tensors)
        now = time.monotonic()
        slot = Slot(what, timeout, now + timeout if timeout else FOREVER)
        slot.since = now
        slot.complete = complete
        slot.future = future
        slot.attended = attended
        slot.definition = definition
        link = self.link(member)
        if future is not None:
            future.help = lambda: link.wait(slot)
        link.request(slot, message, packed.payload, tensors, segments)
        return slot

    def ask(self, member: Member, message: AnyMessage, *, timeout: float, what: Callable[[], str]) -> AnyMessage:
        """A control request and its reply."""
        slot = self.send(member, message, timeout=timeout, what=what)
        self.link(member).wait(slot)
        return self.reply_frame(slot).message

    def notify(self, member: Member, message: AnyMessage, lazy: bool = False) -> None:
        """A notice, which has no reply. A lazy one goes with the next message to that worker, or a few ms later."""
        self.link(member).notify(message, lazy)

    def reply_frame(self, slot: Slot) -> Frame:
        """The frame of a slot that is done; raises what went wrong."""
        if slot.error is not None:
            raise slot.take_error()
        frame = slot.frame
        assert frame is not None
        if frame.kind == Kind.FAILURE:
            if type(frame.message) is not ExceptionReply:
                raise ProtocolError(f"a failure came without an exception: {frame}")
            tensors = rebuild(frame.tensors, frame.buffers) if frame.tensors else []
            raise rebuild_exception(frame.message, frame.payload, tensors)
        return frame

    def reply_tensors(self, slot: Slot) -> list[torch.Tensor]:
        """The tensors that came with a reply."""
        frame, slot.frame = slot.frame, None  # their memory belongs to them alone
        return rebuild(frame.tensors, frame.buffers) if frame is not None and frame.tensors else []

    def value(self, slot: Slot, member: Member, on_reply: OnReply | None = None) -> Any:
        """The value that `member` sent as the reply of a call."""
        frame = self.reply_frame(slot)
        slot.frame = None  # the memory of its tensors belongs to them alone
        tensors = rebuild(frame.tensors, frame.buffers) if frame.tensors else []
        if on_reply is not None:
            try:
                _, tensors = on_reply(frame.message, tensors)
            except BaseException:
                discard(self, member, frame.payload, tensors)
                raise
        return unpack_from(self, member, frame.payload, tensors) if len(frame.payload) else None

    def late_reply(self, frame: Frame, member: Member) -> None:
        """A reply came that nobody waits for any more."""
        for note in self.on_late_reply:
            note(frame, member.worker_id)

    def complete(self, slot: Slot) -> None:
        """Complete a slot from a thread that must not run a user's callbacks."""
        assert slot.complete is not None
        future = slot.future
        if future is not None:
            future.settling = True  # before looking: see `Future.add_done_callback`
            if future.has_callbacks and not self.closing:
                future.settling = False
                complete = slot.complete
                self.crew.submit(lambda: complete(slot))
                return
        slot.complete(slot)

    # --- serving ---

    def serve(self, request: Request) -> None:
        """Give a request to the handler of its message. Whatever goes wrong there is the reply."""
        handler = self.handlers.get(type(request.message))
        if type(request.message) not in NO_WORK:  # a shutdown must not count its own barriers as work that goes on
            self.calls_served += 1
        try:
            if handler is None:
                raise ProtocolError(f"worker {self.info.name!r} has no use for a {type(request.message).__name__}")
            handler(request)
        except BaseException as error:  # also an exit or an interrupt: it ends the call, not the thread that served it
            self.fail(request, error)

    def received(self, request: Request) -> list[torch.Tensor]:
        """The tensors that came with a request."""
        frame = request.frame
        tensors = rebuild(frame.tensors, frame.buffers) if frame.tensors else []
        # The frame must not keep their memory: it belongs to the tensors alone.
        frame.buffers = []
        frame.data = None
        if request.on_tensors is None:
            return tensors
        try:
            noted: list[torch.Tensor] = request.on_tensors(tensors)
            return noted
        except BaseException:
            discard(self, request.caller, frame.payload, tensors)
            raise

    def reply(self, request: Request, message: AnyMessage, packed: Packed = _NOTHING, *, lazy: bool = False) -> None:
        """Answer a request; lazily if nobody waits for the answer."""
        if request.frame.kind == Kind.NOTICE:
            return
        try:
            if request.on_reply is not None:
                message = request.on_reply(message, packed.tensors)
            tensors, segments = describe(packed.tensors) if packed.tensors else ((), ())
            if tensors:
                tensors = place(self.options, self.info.name, request.caller, tensors)
        except Exception as error:
            take_back(packed)
            self.fail(request, error)
            return
        request.session.reply(
            Kind.REPLY, request.frame.request_id, message, packed.payload, tensors, segments, lazy=lazy
        )

    def fail(self, request: Request, error: BaseException) -> None:
        """Answer a request with an error."""
        if failures.isEnabledFor(logging.INFO):
            failures.info("On %s, for %s:", self.info, request.caller.info, exc_info=error)
        if request.frame.kind == Kind.NOTICE:
            log.warning("a %s of %s failed: %s", type(request.message).__name__, request.caller.name, error)
            return
        request.session.reply(Kind.FAILURE, request.frame.request_id, *describe_exception(error, self.info))

    def note_activity(self) -> None:
        """A session is being served: see that no thread keeps it for long."""
        self.health.watch()

    # --- accepting ---

    def _admit(self, hello: Hello) -> Welcome:
        if hello.wanted_incarnation not in (0, self.member.incarnation):
            raise AuthenticationError(
                f"worker {self.info.name!r} was started again (its incarnation is {self.member.incarnation}, "
                f"not {hello.wanted_incarnation})"
            )
        if self.closing:
            raise AuthenticationError(f"worker {self.info.name!r} is shutting down")
        if hello.incarnation in self._dead:
            # What it had asked has been forgotten with it: to take it back could run a request twice.
            raise AuthenticationError(
                f"worker {self.info.name!r} holds {hello.name!r} for dead, after it closed or was silent for too long; "
                "start it again"
            )
        known = self.directory.by_id(hello.worker_id)
        if known is None or known.incarnation != hello.incarnation:
            self.look_for_news()  # it was started, or started again, since the last look
        key = (hello.worker_id, hello.incarnation, hello.link)
        shared = hello.shared_memory and self.options.shared_memory
        return Welcome(
            self.member.worker_id,
            self.info.name,
            self.member.incarnation,
            key in self._sessions,
            shared,
            self._main,
            self.options.max_message_bytes,
        )

    def _admitted(self, hello: Hello, welcome: Welcome, connection: Connection) -> None:
        key = (hello.worker_id, hello.incarnation, hello.link)
        with self._lock:
            session = self._sessions.get(key)
            if hello.incarnation in self._dead:  # found dead between its welcome and now
                connection.close()
                return
            if session is None:
                known = self.directory.by_id(hello.worker_id)
                if known is None or known.incarnation != hello.incarnation:
                    known = Member(hello.name, WorkerId(hello.worker_id), Incarnation(hello.incarnation), (), 0)
                session = self._sessions[key] = Session(self, known, hello.main_module != self._main)
        session.attach(connection)

    # --- the end of others ---

    def link_lost(self, link: Link) -> None:
        """A connection this worker had dialled ended."""
        if self.closing:
            link.close()
        else:
            self.crew.attend(lambda: self.health.revive(link))

    def session_lost(self, session: Session) -> None:
        """A connection another worker had dialled ended."""
        if not self.closing:
            self.health.caller_lost(session)

    def said_goodbye(self, member: Member) -> None:
        """A worker left on purpose."""
        self.lost(member, f"worker {member.name!r} has shut down", departed=True)

    def caller_said_goodbye(self, member: Member) -> None:
        """A worker that calls this one left on purpose."""
        self._leaves(member, f"worker {member.name!r} has shut down")

    def _leaves(self, member: Member, why: str) -> None:
        """Somebody says that a worker leaves. What it answered before comes over the link, and then its end."""
        link = self._linked(member)
        if link is not None:
            link.look_out()
        else:
            self.lost(member, why, departed=True)

    def lost(self, member: Member, why: str, departed: bool = False) -> None:
        """A worker is gone: everything that waits on it ends now."""
        with self._lock:
            if member.incarnation in self._dead:
                return
            error = WorkerDied(
                f"{why} (incarnation {member.incarnation:x}). What it held is lost; repeat the work on another worker, "
                "or after it was started again.",
                worker=member.name,
                incarnation=member.incarnation,
            )
            self._dead[member.incarnation] = error
            link = self._links.get(member.worker_id)
            sessions = [key for key in self._sessions if key[1] == member.incarnation]
            closed = [self._sessions.pop(key) for key in sessions]
        if not departed and not self.closing:
            log.warning("%s", why)
        if link is not None and link.member.incarnation == member.incarnation:
            link.fail(error)
        for session in closed:
            session.close()
        for react in self.on_death:
            try:
                react(member)
            except Exception:
                log.exception("reacting to the loss of %s failed", member.name)

    def is_dead(self, member: Member) -> bool:
        """Whether this incarnation of a worker is known to be gone."""
        return member.incarnation in self._dead

    # --- the end of this one ---

    def under_way(self) -> list[str]:
        """What this worker asked without a reply yet, and what others asked that runs here; waits at barriers aside."""
        slots = [slot for link in self.links() for slot in link.pending.snapshot()]
        asked = [slot.what() for slot in slots if type(slot.resend[0]) not in NO_WORK]
        served = [what for session in self.sessions() for what in session.under_way()]
        return asked + served

    def close(self, farewell: bool = True) -> None:
        """End everything this agent owns."""
        with self._lock:
            if self.closing:
                return
            self.closing = True
        for layer in self.on_close:
            layer()
        if farewell:
            goodbye = Goodbye(self.member.incarnation)
            for session in self.sessions():
                session.farewell(goodbye)
            for link in self.links():
                link.farewell(goodbye)
        self._acceptor.close()
        for link in self.links():
            link.close()
        for session in self.sessions():
            session.close()
        self.keeper.close()
        self.crew.close()
        self._links.clear()
        self._sessions.clear()
