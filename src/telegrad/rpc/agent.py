"""The agent of one worker: it asks other workers, serves what they ask, and ends.

It moves messages and knows none of their meanings: each layer above is one object (`layer.py`) that serves its messages
and is told what happens. Who the others are is kept in `peers/peers.py`, how connections to them come about in
`peers/connect.py`.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from telegrad.rpc.client.connecting import Connecting
from telegrad.rpc.client.outcomes import Dialled, Unanswered
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.client.replies import reply_frame, reply_tensors
from telegrad.rpc.devices import Placement
from telegrad.rpc.futures import Future
from telegrad.rpc.layer import OnReply
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.peers.connect import Connector
from telegrad.rpc.peers.given_up import GivenUpCalls
from telegrad.rpc.peers.heartbeat import Heartbeat
from telegrad.rpc.peers.idle_memory import IdleMemory
from telegrad.rpc.peers.member_records import MemberRecords
from telegrad.rpc.peers.peers import Peers
from telegrad.rpc.request import Request
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.stuck_threads import StuckThreads
from telegrad.rpc.workers import Directory, Member
from telegrad.transport.addresses import Listeners
from telegrad.transport.tls import TlsEnds
from telegrad.wire.codec import Packed
from telegrad.wire.messages import AnyMessage, Goodbye

log = logging.getLogger("telegrad.rpc")

_NOTHING = Packed(b"", [])


class Closable(Protocol):
    """Something that ends with the agent's part in a job."""

    def close(self) -> None:
        """End."""


class Agent:
    """One worker's end of everything. Several agents can live in one process; `rpc` holds the current one."""

    def __init__(
        self,
        member: Member,
        secret: bytes,
        options: RpcBackendOptions,
        listeners: Listeners,
        member_log: MemberRecords | None = None,
        tls: TlsEnds | None = None,
    ) -> None:
        self.member = member
        self.info = member.info
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.directory = Directory()
        self.directory.update([member])
        self.store_recovery: Closable | None = None  # of the job that this worker is in
        self.runtime = runtime = Runtime(self.info, options)
        runtime.placement = Placement(options, member)
        self.io_threads, self.timer, self.layers = runtime.io_threads, runtime.timer, runtime.layers
        self.install, self.layer, self.find_layer = self.layers.install, self.layers.layer, self.layers.find
        self.world_size: int | None = None
        self._lock = threading.Lock()
        self.peers = peers = Peers(runtime, self, member, self.directory)
        peers.member_log = member_log
        self.connector = Connector(runtime, member, self.directory, peers, secret, listeners, tls)
        self.heartbeat = Heartbeat(runtime, member, self.directory, peers)
        self.install(self.heartbeat)
        given_up = GivenUpCalls(runtime, peers)
        self.install(given_up)
        self.stuck_threads = StuckThreads(runtime, peers.sessions)
        self.idle_memory = IdleMemory(runtime, peers)
        # Bound, so that no call pays for a step in between.
        self.find, self.link = peers.find, peers.link
        self.standing, self.mention = peers.standing, peers.mention
        self.lost, self.unanswered = peers.lost, peers.unanswered
        self.is_dead: Callable[[Member], bool] = peers.is_dead
        self.link_lost, self.session_lost = self.heartbeat.link_lost, self.heartbeat.session_lost
        self.said_goodbye, self.caller_said_goodbye = peers.said_goodbye, peers.caller_said_goodbye
        self.session_active, self.session_paused = self.stuck_threads.wake, given_up.session_paused
        self.links = peers.by_name

    def __repr__(self) -> str:
        peers = self.peers
        return f"<Agent {self.info.name!r}: {len(peers.links())} links, {len(peers.sessions())} sessions>"

    def start(self) -> None:
        """Start the threads and begin to accept connections."""
        self.runtime.start()
        self.connector.open()

    def start_heartbeat(self) -> None:
        """All have met: begin to ask silent workers whether they live, and to return idle memory."""
        self.heartbeat.start()
        self.stuck_threads.start()
        self.idle_memory.start()

    @property
    def member_log(self) -> MemberRecords | None:
        """The log of members where this worker met the others; None once it has left."""
        return self.peers.member_log

    @member_log.setter
    def member_log(self, member_log: MemberRecords | None) -> None:
        self.peers.member_log = member_log

    @property
    def closing(self) -> bool:
        """Whether this agent is ending."""
        return self.runtime.closing

    # --- asking ---

    def send(
        self,
        member: Member,
        message: AnyMessage,
        packed: Packed = _NOTHING,
        *,
        timeout: float,
        what: str | Callable[[], str],
        complete: Callable[[Slot], None] | None = None,
        future: Future[Any] | None = None,
        on_reply: OnReply | None = None,
        definition: bytes = b"",
        attended: bool = False,
    ) -> Slot:
        """Send a request; its slot is completed by `complete`, or waited for with `wait`, or both if `attended`.

        `definition` is that of the function the message calls by its number."""
        return self.link(member).send(
            message,
            packed,
            timeout=timeout,
            what=what,
            complete=complete,
            future=future,
            on_reply=on_reply,
            definition=definition,
            attended=attended,
        )

    def ask(self, member: Member, message: AnyMessage, *, timeout: float, what: Callable[[], str]) -> AnyMessage:
        """A control request and its reply."""
        slot = self.send(member, message, timeout=timeout, what=what)
        slot.wait()
        return self.reply_frame(slot).message

    def notify(self, member: Member, message: AnyMessage, lazy: bool = False) -> None:
        """A notice, which has no reply. A lazy one goes with the next message to that worker, or a few ms later."""
        self.link(member).notify(message, lazy)

    # The frame of a slot that is done, or what went wrong, raised; and the tensors that came with it.
    reply_frame, reply_tensors = staticmethod(reply_frame), staticmethod(reply_tensors)

    # --- serving: the tensors that came with a request, and its answer or error ---

    received, reply, fail = staticmethod(Request.take_tensors), staticmethod(Request.reply), staticmethod(Request.fail)

    # --- what links and sessions tell: most of it is bound above ---

    def dial(self, link: Connecting, deadline: float) -> Dialled | Unanswered:
        """A new connection for a link."""
        return self.connector.dial(link.member, link.number, link.ticket, link.replies.arm, deadline)

    # --- the end ---

    def under_way(self) -> list[str]:
        """What this worker asked without a reply yet, and what others asked that runs here; waits at barriers aside."""
        slots = [slot for link in self.peers.links() for slot in link.pending.snapshot()]
        asked = [slot.what() for slot in slots if self.layers.is_work(type(slot.resend[0]))]
        served = [what for session in self.peers.sessions() for what in session.under_way()]
        return asked + served

    def close(self, farewell: bool = True, ending: str = "") -> None:
        """End everything this agent owns; `ending` tells the others how its program ended without a shutdown."""
        with self._lock:
            if self.closing:
                return
            self.runtime.closing = True
        for layer in self.layers:
            layer.on_close()
        if farewell:
            goodbye = Goodbye(self.member.incarnation, ending)
            for session in self.peers.sessions():
                session.mention(goodbye)
            for link in self.peers.links():
                link.mention(goodbye)
        self.connector.close()
        for link in self.peers.links():
            link.close()
        for session in self.peers.sessions():
            session.close()
        self.runtime.close()
        self.peers.forget_all()
