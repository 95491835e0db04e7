"""The agent of one worker: it asks other workers, serves what they ask, and ends.

It moves messages and knows none of their meanings: each layer above is one object (`layer.py`) that serves its messages
and is told what happens. Who the others are is kept in `peers/peers.py`, how connections to them come about in
`peers/connect.py`.
"""

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from telegrad.rpc.client.link import Dialled, Link, Unanswered
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.client.replies import reply_frame, reply_tensors
from telegrad.rpc.futures import Future
from telegrad.rpc.job.member_log import MemberLog
from telegrad.rpc.layer import OnReply
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.peers.connect import Connector
from telegrad.rpc.peers.liveness import Liveness
from telegrad.rpc.peers.peers import Peers
from telegrad.rpc.request import Request
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.session import Session
from telegrad.rpc.threads.wakeup import Wakeup
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Directory, Member
from telegrad.transport.addresses import Listeners
from telegrad.transport.tls import TlsEnds
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame
from telegrad.wire.messages import AnyMessage, Goodbye

if TYPE_CHECKING:
    from telegrad.rpc.job.store_recovery import StoreRecovery

log = logging.getLogger("telegrad.rpc")

_NOTHING = Packed(b"", [])
_LONG = 3600.0


class Agent:
    """One worker's end of everything. Several agents can live in one process; `rpc` holds the current one."""

    def __init__(
        self,
        member: Member,
        secret: bytes,
        options: RpcBackendOptions,
        listeners: Listeners,
        place: MemberLog | None = None,
        tls: TlsEnds | None = None,
    ) -> None:
        self.member = member
        self.info = member.info
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.directory = Directory()
        self.directory.update([member])
        self.place = place
        self.store_recovery: StoreRecovery | None = None
        self.runtime = runtime = Runtime(self.info, options)
        self.io_threads, self.timer, self.layers = runtime.io_threads, runtime.timer, runtime.layers
        self.install, self.layer, self.find_layer = self.layers.install, self.layers.layer, self.layers.find
        self.liveness = Liveness(self)
        self.install(self.liveness)
        self.world_size: int | None = None
        self._lock = threading.Lock()
        self.peers = peers = Peers(self)
        self.connector = Connector(self, secret, listeners, tls)
        # Bound, so that no call pays for a step in between.
        self.find, self.link = peers.find, peers.link
        self.lost, self.is_dead = peers.lost, peers.is_dead
        self.links = peers.by_name

    def __repr__(self) -> str:
        peers = self.peers
        return f"<Agent {self.info.name!r}: {len(peers.links())} links, {len(peers.sessions())} sessions>"

    def start(self) -> None:
        """Start the threads and begin to accept connections."""
        self.runtime.start()
        self.connector.open()

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

    def ask_patiently(
        self, member: Member, message: AnyMessage, *, timeout: float, what: Callable[[], str]
    ) -> AnyMessage:
        """The same for what may take for ever. Whoever waits in person reads the link for all, and each reply to others
        would have to pass through a thread that sleeps most of the time; this one leaves the reading to them."""
        wakeup = Wakeup()
        slot = self.send(member, message, timeout=timeout, what=what, complete=lambda _: wakeup.set())
        while not slot.done:
            with blocking():
                wakeup.wait(_LONG)
        return self.reply_frame(slot).message

    def notify(self, member: Member, message: AnyMessage, lazy: bool = False) -> None:
        """A notice, which has no reply. A lazy one goes with the next message to that worker, or a few ms later."""
        self.link(member).notify(message, lazy)

    def reply_frame(self, slot: Slot) -> Frame:
        """The frame of a slot that is done; raises what went wrong."""
        return reply_frame(slot)

    def reply_tensors(self, slot: Slot) -> list[torch.Tensor]:
        """The tensors that came with a reply."""
        return reply_tensors(slot)

    # --- serving ---

    def received(self, request: Request) -> list[torch.Tensor]:
        """The tensors that came with a request."""
        return request.take_tensors()

    def reply(self, request: Request, message: AnyMessage, packed: Packed = _NOTHING, *, lazy: bool = False) -> None:
        """Answer a request; lazily if nobody waits for the answer."""
        request.reply(message, packed, lazy=lazy)

    def fail(self, request: Request, error: BaseException) -> None:
        """Answer a request with an error."""
        request.fail(error)

    # --- what links and sessions tell ---

    def dial(self, link: Link, deadline: float) -> Dialled | Unanswered:
        """A new connection for a link."""
        return self.connector.dial(link.member, link.number, link.ticket, link.expect, deadline)

    def link_lost(self, link: Link) -> None:
        """A connection this worker had dialled ended."""
        if self.closing:
            link.close()
        else:
            self.io_threads.attend(lambda: self.liveness.revive(link))

    def said_goodbye(self, member: Member) -> None:
        """A worker that this one calls leaves."""
        self.peers.said_goodbye(member)

    def session_active(self) -> None:
        """A session is being served: see that no thread keeps it for long."""
        self.liveness.watch()

    def session_lost(self, session: Session) -> None:
        """A connection another worker had dialled ended."""
        if not self.closing:
            self.liveness.caller_lost(session)

    def caller_said_goodbye(self, member: Member) -> None:
        """A worker that calls this one leaves."""
        self.peers.caller_said_goodbye(member)

    # --- the end ---

    def under_way(self) -> list[str]:
        """What this worker asked without a reply yet, and what others asked that runs here; waits at barriers aside."""
        slots = [slot for link in self.peers.links() for slot in link.pending.snapshot()]
        asked = [slot.what() for slot in slots if self.layers.is_work(type(slot.resend[0]))]
        served = [what for session in self.peers.sessions() for what in session.under_way()]
        return asked + served

    def close(self, farewell: bool = True) -> None:
        """End everything this agent owns."""
        with self._lock:
            if self.closing:
                return
            self.runtime.closing = True
        for layer in self.layers:
            layer.on_close()
        if farewell:
            goodbye = Goodbye(self.member.incarnation)
            for session in self.peers.sessions():
                session.farewell(goodbye)
            for link in self.peers.links():
                link.farewell(goodbye)
        self.connector.close()
        for link in self.peers.links():
            link.close()
        for session in self.peers.sessions():
            session.close()
        self.runtime.close()
        self.peers.forget_all()
