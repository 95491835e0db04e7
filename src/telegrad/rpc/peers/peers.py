"""The other workers as this one knows them: a link to each that it asks, a session for each that asks it, who is gone.

A worker that was started again is another one: links, sessions and ends are those of an incarnation. Once one is gone
it stays gone, whatever is heard of it later, since what it had asked was forgotten with it.
"""

import hmac
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol
from weakref import WeakSet

from telegrad.errors import AuthenticationError, NotInitialized, ProtocolError, UnknownWorker, WorkerDied
from telegrad.ids import Incarnation, WorkerId, generation_of
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.outcomes import LinkEvents
from telegrad.rpc.peers.liveness import Action, Liveness
from telegrad.rpc.peers.member_records import MemberRecords
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.session import Session, SessionEvents
from telegrad.rpc.workers import Directory, Member, WorkerInfo
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import Hello
from telegrad.wire.messages import AnyMessage

log = logging.getLogger("telegrad.rpc")

MOST_SESSIONS = 4096  # links of all callers together
MOST_OF_ONE = 64  # of one caller that is not trusted
_MOST_DEAD = 65536  # ends that are remembered
_FRESH_SECONDS = 0.05  # a worker needs longer than that to be started again
_LOOK_SECONDS = 0.02
_LONGEST_ENDING = 400  # characters of what a worker says of its end


def _key(hello: Hello) -> tuple[int, int, int]:
    """A session serves one link of one incarnation of a worker, over all its connections."""
    return (hello.worker_id, hello.incarnation, hello.link)


class PeerEvents(LinkEvents, SessionEvents, Protocol):
    """Whom the links and sessions made here tell what happens to them."""


class Peers:
    """Links, sessions and ends of the other workers of one agent."""

    def __init__(self, runtime: Runtime, events: PeerEvents, me: Member, directory: Directory) -> None:
        self._runtime = runtime
        self._events = events
        self._me = me
        self._directory = directory
        self.member_log: MemberRecords | None = None  # where other workers say that they come and go
        self._looked = 0.0  # when, the last time
        self._looked_at: dict[int, float] = {}  # the same of single workers, by id
        self._liveness: dict[int, Liveness] = {}  # by incarnation
        self._lock = threading.Lock()
        self._links: dict[WorkerId, Link] = {}
        # The same by name: one that is connected is the right one, since the end of a worker ends its connection.
        self.by_name: dict[str, Link] = {}
        self._link_numbers = 0
        self._sessions: dict[tuple[int, int, int], Session] = {}
        self._callers: dict[int, int] = {}  # by incarnation: the ids of those who have sessions
        self._welcomed: dict[int, Hello] = {}  # by id: callers that are let in, and are not served yet
        self._orphaned: WeakSet[Session] = WeakSet()  # of the dead, as long as something they asked still runs here
        self._dead: dict[int, WorkerDied] = {}  # by incarnation

    # --- who ---

    def find(self, to: str | int | WorkerInfo) -> Member:
        """The member meant by a name, an id or a WorkerInfo; looks it up in the rendezvous store if not linked."""
        member = self._known(to)
        if member is not None:
            link = self._links.get(member.worker_id)
            if link is not None and link.member is member and link.current is not None:
                return member
        if (member is None or self._linked(member) is None) and not self._runtime.closing:
            if member is None or not self._has_fresh_news_of(member):
                self._look_for(to)  # it may be new, or have been started again
            member = self._known(to)
            if member is None:
                member = self._await_record(to)
        if member is None:  # one that left is known to be dead: whatever is asked of it says so
            member = self._directory.who_left(to.name if isinstance(to, WorkerInfo) else to)
        if member is None:
            self.everyone()  # whom the error names
            raise self._directory.unknown(to)
        return member

    def _look_for(self, to: str | int | WorkerInfo) -> None:
        self.look_for_news(to.id if isinstance(to, WorkerInfo) else to)

    def _await_record(self, to: str | int | WorkerInfo) -> Member | None:
        """A worker of a large job that may only be unknown because the store of its record is being opened anew."""
        deadline = time.monotonic() + self._runtime.patience
        while self.member_log is not None and self.member_log.is_settling and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            self._look_for(to)
            member = self._known(to)
            if member is not None:
                return member
        return None

    def everyone(self) -> list[Member]:
        """All members, by id. In a large job their records are read when this is first asked."""
        if self.member_log is not None and not self.member_log.reads_all:
            self.look_for_news()
        return self._directory.members()

    def _known(self, to: str | int | WorkerInfo) -> Member | None:
        if isinstance(to, str):
            return self._directory.by_name(to)
        if isinstance(to, WorkerInfo):
            member = self._directory.by_id(to.id)
            return member if member is not None and member.name == to.name else None
        if isinstance(to, int) and not isinstance(to, bool):
            return self._directory.by_id(to)
        raise UnknownWorker(
            f"Cannot get WorkerInfo from name {to!r}: a worker is named by its name, its rank or its WorkerInfo"
        )

    def _has_fresh_news_of(self, member: Member) -> bool:
        """Whether a worker that is called for the first time need not be looked up: one that calls all others looks
        once, and not once for each."""
        looked = max(self._looked, self._looked_at.get(member.worker_id, 0.0))
        return member.worker_id not in self._links and time.monotonic() - looked < _FRESH_SECONDS

    def look_for_news(self, about: str | int | None = None) -> None:
        """Read what others published since the last time; in a large job only the record `about` one worker, if that
        is all that is asked for."""
        if self.member_log is None:
            return
        now = time.monotonic()
        if about is None or self.member_log.reads_all:
            self._looked = now

        def take(members: Sequence[Member]) -> None:
            self._looked_at.update(dict.fromkeys((m.worker_id for m in members), now))
            self.take_news(members)

        try:
            self.member_log.news(take, about)
        except RuntimeError as error:
            log.debug("the rendezvous store does not answer: %s", error)

    def take_news(self, members: Sequence[Member]) -> None:
        """Take in the records that the rendezvous store has, as far as the layers believe them."""
        for layer in self._runtime.layers:
            members = layer.on_news(members)
        self.learn(members)

    def learn(self, members: Sequence[Member]) -> None:
        """Take in records of members."""
        for gone in self._directory.update(members):
            if gone.incarnation == self._me.incarnation:
                continue
            if self._directory.has_left(gone):
                self._leaves(gone, self._directory.ending_of(gone))
            else:
                self._replaced(gone)

    def _replaced(self, member: Member) -> None:
        """A later incarnation of a worker was started: this one is dead, whatever was still expected of it."""
        if self.liveness_of(member).replaced(time.monotonic()) is Action.GIVE_UP:
            self.lost(member, f"worker {member.name!r} was started again")

    def wait_for_return(self, member: Member, seconds: float) -> None:
        """Wait until a worker that died is back under its name; raises what ended it at the deadline."""
        deadline = time.monotonic() + seconds
        while True:
            self.look_for_news(member.name)
            known = self._directory.by_name(member.name)
            if known is not None and known.incarnation != member.incarnation:
                return
            if time.monotonic() >= deadline or self._runtime.closing:
                raise WorkerDied(
                    f"worker {member.name!r} ended and was not started again within {seconds:g} s.",
                    worker=member.name,
                    incarnation=member.incarnation,
                )
            time.sleep(_LOOK_SECONDS)

    # --- links ---

    def link(self, member: Member) -> Link:
        """The link to this incarnation of a worker."""
        link = self._links.get(member.worker_id)
        if link is not None and (link.member is member or link.member.incarnation == member.incarnation):
            return link
        if self._runtime.closing:
            raise NotInitialized(
                f"worker {self._me.name!r} is shutting down; nothing can be asked of {member.name!r} now"
            )
        if link is not None:  # two have this id: the one started first is gone, whatever was still expected of it
            self._replaced(min(link.member, member, key=lambda m: generation_of(m.incarnation)))
        with self._lock:
            link = self._links.get(member.worker_id)
            if link is None or link.member.incarnation != member.incarnation:
                self._link_numbers += 1
                new = Link(self._runtime, self._events, member, self._link_numbers)
                new.dead = self._dead.get(member.incarnation)
                if link is None or new.dead is None:
                    self._links[member.worker_id] = self.by_name[member.name] = new
                link = new
            return link

    def mention(self, worker: WorkerId, message: AnyMessage) -> None:
        """Have a worker told something with the next message to it, or soon; one that is gone need not know."""
        link = self._links.get(worker)
        if link is None or link.current is None:
            member = self._directory.by_id(worker)
            if member is None or self.is_dead(member):
                return
            link = self.link(member)
        link.notify(message, True)

    def standing(self, worker: WorkerId) -> Link | None:
        """The link to a worker if there is one that is connected, as there mostly is."""
        link = self._links.get(worker)
        return link if link is not None and link.current is not None else None

    def _linked(self, member: Member) -> Link | None:
        """The link to this incarnation of a worker if it is connected: then the worker's end will show there."""
        link = self._links.get(member.worker_id)
        connected = link is not None and link.connected and link.member.incarnation == member.incarnation
        return link if connected else None

    def links(self) -> list[Link]:
        """All links there are."""
        with self._lock:
            return list(self._links.values())

    # --- sessions ---

    def sessions(self) -> list[Session]:
        """All sessions there are."""
        with self._lock:
            return list(self._sessions.values())

    def orphaned(self) -> list[Session]:
        """Sessions of workers that died, in which something is still running."""
        with self._lock:
            return list(self._orphaned)

    def session_for(self, hello: Hello) -> Session | None:
        """The session of the link that a caller dials for, if it has dialled before."""
        return self._sessions.get(_key(hello))

    def is_of_another(self, hello: Hello) -> bool:
        """Whether a caller says that it is the incarnation of another worker, whose end it could then tell."""
        worker_id, incarnation = hello.worker_id, hello.incarnation
        holders = (self._directory.holder_of(incarnation), self._callers.get(incarnation))
        return any(holder not in (None, worker_id) for holder in holders)

    def keep_place(self, hello: Hello) -> None:
        """A caller is about to be told that it is welcome: its link counts from now on, since several may be on their
        way in, until `serve` or `give_back_place`. AuthenticationError if there are too many."""
        key = _key(hello)
        with self._lock:
            coming = {_key(other): other.name for other in self._welcomed.values()}
            if key not in self._sessions and key not in coming:
                if len(self._sessions) + sum(other not in self._sessions for other in coming) >= MOST_SESSIONS:
                    raise AuthenticationError(f"worker {self._me.name!r} serves {MOST_SESSIONS} links already")
                if self._runtime.options.exports_only:
                    self._check_links(hello.name, coming)
            self._welcomed[id(hello)] = hello

    def _check_links(self, name: str, coming: dict[tuple[int, int, int], str]) -> None:
        """Raise if a party that is not trusted has as many links as it may have."""
        links = {of: session.member.name for of, session in self._sessions.items()}
        if sum(of_one == name for of_one in (links | coming).values()) >= MOST_OF_ONE:
            raise AuthenticationError(f"worker {self._me.name!r} serves {MOST_OF_ONE} links of {name!r} already")

    def give_back_place(self, hello: Hello) -> None:
        """A caller that was welcome is gone before it could be served."""
        self._welcomed.pop(id(hello), None)

    def serve(self, hello: Hello, connection: Connection, main_by_value: bool) -> None:
        """Serve what a caller that was let in asks over a connection, its first or the next."""
        known = self._directory.by_id(hello.worker_id)
        with self._lock:
            self._welcomed.pop(id(hello), None)
            if hello.incarnation in self._dead:  # found dead between its welcome and now
                connection.close()
                return
            session = self._sessions.get(_key(hello))
            if session is not None and not hmac.compare_digest(session.ticket, hello.ticket):
                connection.close()  # two began the same link at once: it is the other's
                return
            if session is None:
                if known is None or known.incarnation != hello.incarnation:
                    known = Member(hello.name, WorkerId(hello.worker_id), Incarnation(hello.incarnation), (), 0)
                session = Session(self._runtime, self._events, known, main_by_value, hello.link, hello.ticket)
                self._sessions[_key(hello)] = session
                self._callers[hello.incarnation] = hello.worker_id
        if self._runtime.options.exports_only:
            connection.ask_before_large(partial(self._check_room, hello.name))
        session.attach(connection)

    def _check_room(self, name: str, nbytes: int) -> None:
        """A large message of a party begins: ProtocolError if it has too much under way, over all its connections."""
        options = self._runtime.options
        connections = [session.connection for session in self.sessions() if session.member.name == name]
        under_way = sum(each.reserved for each in connections if each is not None)
        if under_way + nbytes > max(options.limits.kept_bytes, options.max_message_bytes):
            raise ProtocolError(
                f"rule 'kept_bytes': messages of {under_way} bytes of {name!r} are on their way already"
            )

    # --- who is gone ---

    def liveness_of(self, member: Member) -> Liveness:
        """What is known of an incarnation of a worker: who asks decides under the GIL, one event at a time."""
        options = self._runtime.options
        return self._liveness.setdefault(member.incarnation, Liveness(options.heartbeat, self._runtime.patience))

    def said_goodbye(self, member: Member, ending: str) -> None:
        """A worker left on purpose, or its program has ended without a shutdown, in its own words."""
        if self.liveness_of(member).said_goodbye(time.monotonic()) is Action.LET_GO:
            how = "".join(c if c.isprintable() else " " for c in ending[:_LONGEST_ENDING]) or "has shut down"
            self.lost(member, f"worker {member.name!r} {how}", departed=not ending)

    def caller_said_goodbye(self, member: Member, ending: str) -> None:
        """The same of a worker that calls this one."""
        self._leaves(member, ending)

    def unanswered(self, member: Member, why: str) -> None:
        """Nobody listens any more where a worker did. If it has said that it leaves, that is what ended it."""
        self.look_for_news(member.worker_id)
        self.lost(member, why)

    def _leaves(self, member: Member, ending: str) -> None:
        """Somebody says that a worker leaves. What it answered before comes over the link, and then its end."""
        link = self._linked(member)
        if link is not None:
            link.expect()
        else:
            self.said_goodbye(member, ending)

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
            while len(self._dead) > _MOST_DEAD:
                del self._dead[next(iter(self._dead))]
            self._liveness.pop(member.incarnation, None)
            link = self._links.get(member.worker_id)
            self._callers.pop(member.incarnation, None)
            sessions = [key for key in self._sessions if key[1] == member.incarnation]
            closed = [self._sessions.pop(key) for key in sessions]
            self._orphaned.update(closed)
        if not departed and not self._runtime.closing:
            log.warning("%s", why)
        if link is not None and link.member.incarnation == member.incarnation:
            link.fail(error)
        for session in closed:
            session.close()
        for layer in self._runtime.layers:
            try:
                layer.on_death(member)
            except Exception:
                log.exception("reacting to the loss of %s failed", member.name)

    def is_dead(self, member: Member) -> bool:
        """Whether this incarnation of a worker is known to be gone."""
        return member.incarnation in self._dead

    def has_lost(self, incarnation: int) -> bool:
        """The same, of one of whom no more than its incarnation is known."""
        return incarnation in self._dead

    def forget_all(self) -> None:
        """The agent has closed every link and session."""
        with self._lock:  # a thread may still hear a goodbye
            self._links.clear()
            self.by_name.clear()
            self._sessions.clear()
            self._callers.clear()
