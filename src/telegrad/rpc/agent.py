"""The agent of one worker: it asks other workers, serves what they ask, and ends.

It moves messages and knows none of their meanings: each layer above is one object (`layer.py`) that serves its messages
and is told what happens. Who the others are is kept in `peers/peers.py`, how connections to them come about in
`peers/connect.py`.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from telegrad import trace
from telegrad.cuda import order
from telegrad.errors import ProtocolError
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.devices import Placement
from telegrad.rpc.futures import Future
from telegrad.rpc.job.member_log import MemberLog
from telegrad.rpc.layer import Layers, OnReply
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.packing import discard, take_back, unpack_from
from telegrad.rpc.peers.connect import Connector
from telegrad.rpc.peers.liveness import Liveness
from telegrad.rpc.peers.peers import Peers
from telegrad.rpc.remote_errors import describe_exception, rebuild_exception
from telegrad.rpc.server.request import Request
from telegrad.rpc.threads.delayed_flush import DelayedFlush
from telegrad.rpc.threads.io_threads import IoThreads
from telegrad.rpc.threads.timer import Timer
from telegrad.rpc.threads.wakeup import Wakeup
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Directory, Member
from telegrad.transport.addresses import Listeners
from telegrad.transport.copying import Helpers
from telegrad.transport.tls import TlsEnds
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.messages import AnyMessage, ExceptionReply, Goodbye
from telegrad.wire.returning import mark_spare, storages_of
from telegrad.wire.tensors import disassemble

if TYPE_CHECKING:
    from telegrad.rpc.job.store_recovery import StoreRecovery

log = logging.getLogger("telegrad.rpc")
# Of functions called from elsewhere; their callers are told anyway.
failures = logging.getLogger("telegrad.rpc.failures")

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
        self.placement = Placement(options, member)
        self.directory = Directory()
        self.directory.update([member])
        self.place = place
        self.store_recovery: StoreRecovery | None = None
        self.io_threads = IoThreads(f"telegrad-{member.name}", options.num_worker_threads)
        self.helpers = Helpers(f"telegrad-{member.name}")
        self.timer = Timer(f"telegrad-{member.name}")
        self.delayed_flush = DelayedFlush(self.timer)
        self.layers = layers = Layers()
        self.install, self.layer, self.find_layer = layers.install, layers.layer, layers.find
        self.liveness = Liveness(self)
        self.install(self.liveness)
        self.world_size: int | None = None
        self.calls_made = 0
        self.calls_served = 0
        self.closing = False
        self._lock = threading.Lock()
        self.peers = peers = Peers(self)
        self.connector = Connector(self, secret, listeners, tls)
        # Bound, so that no call pays for a step in between.
        self.find, self.link = peers.find, peers.link
        self.lost, self.is_dead = peers.lost, peers.is_dead
        self.wrap_call = layers.wrap_call
        self._served = layers.served

    def __repr__(self) -> str:
        peers = self.peers
        return f"<Agent {self.info.name!r}: {len(peers.links())} links, {len(peers.sessions())} sessions>"

    def start(self) -> None:
        """Start the threads and begin to accept connections."""
        self.io_threads.start()
        self.timer.start()
        self.connector.open()

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
        tensors, memory = disassemble(packed.tensors) if packed.tensors else ((), ())
        if tensors:
            tensors = self.placement.place(member, tensors)
        now = time.monotonic()
        slot = Slot(what, timeout, now + timeout if timeout else FOREVER)
        slot.since = now
        slot.link = link = self.link(member)
        if complete is not None:
            slot.complete = complete
            slot.attended = attended
        if future is not None:
            slot.future = future
            future.awaited = slot
        if on_reply is not None:
            slot.on_reply = on_reply
        if definition:
            slot.definition = definition
        if trace.recorder is not None:
            trace.recorder.asked(slot, message, packed.payload, tensors, memory)
        link.request(slot, message, packed.payload, tensors, memory)
        return slot

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
        if slot.error is not None:
            raise slot.take_error()
        frame = slot.frame
        assert frame is not None
        if frame.kind == Kind.FAILURE:
            if type(frame.message) is not ExceptionReply:
                raise ProtocolError(f"a failure came without an exception: {frame}")
            raise rebuild_exception(frame.message, frame.payload, frame.take_tensors())
        return frame

    def reply_tensors(self, slot: Slot) -> list[torch.Tensor]:
        """The tensors that came with a reply."""
        frame, slot.frame = slot.frame, None
        return [] if frame is None else frame.take_tensors()

    def value(self, slot: Slot) -> Any:
        """The value that came as the reply of a call."""
        frame = self.reply_frame(slot)
        tensors = frame.take_tensors()
        if slot.on_reply is not None:
            try:
                _, tensors = slot.on_reply(frame.message, tensors)
            except BaseException:
                discard(self, slot.link.member, frame.payload, tensors)
                raise
        return unpack_from(self, slot.link.member, frame.payload, tensors) if len(frame.payload) else None

    def late_reply(self, frame: Frame, member: Member) -> None:
        """A reply came that nobody waits for any more."""
        for layer in self.layers:
            layer.on_late_reply(frame, member.worker_id)

    def complete(self, slot: Slot) -> None:
        """Complete a slot from a thread that must not run a user's callbacks."""
        complete = slot.complete
        if complete is None:
            return  # its caller came for the reply in person, and was first
        future = slot.future
        if future is not None:
            future.settling = True  # before looking: see `Future.add_done_callback`
            if future.has_callbacks and not self.closing:
                future.settling = False
                self.io_threads.submit(lambda: complete(slot))
                return
        complete(slot)

    # --- serving ---

    def serve(self, request: Request) -> None:
        """Give a request to the handler of its message. Whatever goes wrong there is the reply."""
        if trace.recorder is not None and trace.recorder.takes(request):
            trace.recorder.serve(request, self.serve)
            return
        served = self._served.get(type(request.message))
        try:
            if served is None:
                raise ProtocolError(f"worker {self.info.name!r} has no use for a {type(request.message).__name__}")
            if served.counts_as_work:
                self.calls_served += 1
            if order.active and served.counts_as_work:
                order.run(served.handler, request, getattr(request.frame, "arrived", 0))
            else:
                served.handler(request)
        except BaseException as error:  # also an exit or an interrupt: it ends the call, not the thread that served it
            self.fail(request, error)

    def received(self, request: Request) -> list[torch.Tensor]:
        """The tensors that came with a request."""
        frame = request.frame
        may_return = frame.is_large
        tensors = frame.take_tensors()
        if may_return:
            request.came = storages_of(tensors)
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
        if order.active:
            order.answering()
        try:
            tensors, memory = disassemble(packed.tensors) if packed.tensors else ((), ())
            if tensors:
                tensors = self.placement.place(request.caller, tensors, reply=True)
            # Once nothing can be refused any more: what a layer notes about a reply must be about one that leaves.
            if request.on_reply is not None:
                message = request.on_reply(message, packed.tensors)
            if request.came and tensors and not isinstance(memory, bytes):
                memory = mark_spare(packed.tensors, memory, request.came)
        except Exception as error:
            take_back(packed)
            self.fail(request, error)
            return
        request.session.reply(Kind.REPLY, request.frame.request_id, message, packed.payload, tensors, memory, lazy=lazy)

    def fail(self, request: Request, error: BaseException) -> None:
        """Answer a request with an error."""
        if failures.isEnabledFor(logging.INFO):
            failures.info("On %s, for %s:", self.info, request.caller.info, exc_info=error)
        if request.frame.kind == Kind.NOTICE:
            log.warning("a %s of %s failed: %s", type(request.message).__name__, request.caller.name, error)
            return
        if order.active:
            order.answering()
        request.session.reply(Kind.FAILURE, request.frame.request_id, *describe_exception(error, self.info))

    def note_activity(self) -> None:
        """A session is being served: see that no thread keeps it for long."""
        self.liveness.watch()

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
            self.closing = True
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
        self.timer.close()
        self.io_threads.close()
        self.helpers.close()
        self.peers.forget_all()
