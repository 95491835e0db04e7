"""What a worker that runs exported functions alone does for a peer, and what it refuses, naming the rule.

Every request passes here before its handler. What may be asked at all is a short list; each kind has its rule. Limits
are counted for each peer by itself, so that one that asks too much is refused and the others notice nothing.
"""

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from telegrad.errors import CallRefused, TooManyCalls
from telegrad.ids import worker_id_of, worker_of
from telegrad.rpc.layer import Layer
from telegrad.rpc.request import Request
from telegrad.rpc.trust.audit import Audit
from telegrad.rpc.trust.exports import Limits, find_export
from telegrad.rpc.trust.held import held_by
from telegrad.rpc.trust.rate import TokenBucket
from telegrad.wire.codec import is_modest
from telegrad.wire.messages import (
    AbortPass,
    Ack,
    Barrier,
    BeginPass,
    CancelCall,
    CleanupAutogradContext,
    DialBack,
    GivenUp,
    ParticipantDied,
    Ping,
    PropagateGradients,
    PythonCall,
    PythonRemoteCall,
    RpcWithAutograd,
    RRefAck,
    RRefBackward,
    RRefChildAccept,
    RRefCreationFailed,
    RRefFetch,
    RRefFlush,
    RRefFlushed,
    RRefUserDelete,
    TooLateForPass,
)
from telegrad.wire.tensor.specs import written_out

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent
    from telegrad.rpc.workers import Member

# Needs no rule of its own: it concerns what the sender has here already, or nothing.
_FREE = frozenset({Ack, Barrier, CancelCall, DialBack, GivenUp, Ping, RRefAck, RRefChildAccept, RRefUserDelete})
# About a context, from one that has a part in it; nothing is done where there is no such context.
_ABOUT_CONTEXTS = frozenset({AbortPass, CleanupAutogradContext, ParticipantDied, TooLateForPass})
# The same, and this worker must have a part in it, too.
_OVER_CONTEXTS = frozenset({BeginPass, PropagateGradients, RRefBackward})
_MOST_REPLIES = 1024  # that a peer may leave without a word that they arrived; ours says so after 256
_LARGE = 64 * 1024  # bytes of arguments that are worth counting


class ContextHolder(Layer):
    """What the guard asks the autograd layer, which derives from this."""

    def get(self, context_id: int) -> Any:
        """The context of that id, or None if this worker has no part in it."""

    def has_part(self, context_id: int, worker_id: int) -> bool:
        """Whether a worker is known to have a part in a context that is known here."""
        raise NotImplementedError


class ReferenceHolder(Layer):
    """What the guard asks the layer of references, which derives from this."""

    def keeps(self, rref_id: int) -> bool:
        """Whether the value of a reference is kept here."""
        raise NotImplementedError


class _Peer:
    """What one peer has asked for."""

    def __init__(self, limits: Limits) -> None:
        self.rate = TokenBucket(limits.calls_per_second, 2 * limits.calls_per_second)
        # Of its own, so that who calls as often as it may can still let go. There are no more of these than of the
        # calls that made what they let go of.
        self.letting_go = TokenBucket(limits.calls_per_second, 2 * limits.calls_per_second)
        self.recorded = TokenBucket(1.0, 10.0)  # refusals for asking too often, of which a record is kept
        self.left_out = 0  # and those of which none was
        self.sessions: WeakSet[Any] = WeakSet()
        self.references: dict[int, int] = {}  # with the fork that each was made for
        self.held: dict[int, dict[int, int]] = {}  # by reference: bytes of its value by what has them
        self.contexts: dict[int, list[int]] = {}  # for each how many calls it made in it, with how many bytes
        self.arguments: dict[tuple[int, int], int] = {}  # bytes of the large ones, by session and request


class Guard:
    """The rules of one agent."""

    def __init__(self, agent: "Agent", limits: Limits) -> None:
        self._agent = agent
        self.limits = limits
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def check_rate(self, request: Request) -> None:
        """Raise TooManyCalls if its sender asks too often. Before anything is written down about the request: of many
        such refusals one a second is recorded, with the number of the others."""
        peer, limits = self._peer(request.caller), self.limits
        if type(request.message) is CleanupAutogradContext and self._is_shared(request.message, request.caller):
            return  # once, since then it has ended; were it refused, nobody would end it
        if (peer.letting_go if type(request.message) is RRefUserDelete else peer.rate).take():
            return
        others = ""
        if peer.recorded.take():
            others, peer.left_out = f" ({peer.left_out} more were refused before)" if peer.left_out else "", 0
        else:
            peer.left_out += 1
            request.recorded = False
        text = f"rule 'calls_per_second': more than {limits.calls_per_second:g}; ask again later{others}"
        raise TooManyCalls(text)

    def check(self, request: Request) -> None:
        """Raise CallRefused unless the rules allow a request."""
        message, caller = request.message, request.caller
        if type(message) is RRefUserDelete:
            return
        peer = self._peer(caller)
        self._check_amounts(peer, request)
        if type(message) is RpcWithAutograd:
            if worker_of(message.metadata.message_id) != caller.worker_id:
                raise CallRefused("rule 'own contexts': a call names a message that another worker sent")
            self._check_call(peer, request, message.call)
            self._check_context(peer, message.metadata.context_id, written_out(request.frame.tensors))
        elif type(message) in (PythonCall, PythonRemoteCall, RRefFetch):
            self._check_call(peer, request, message)
        elif type(message) in _OVER_CONTEXTS or type(message) in _ABOUT_CONTEXTS:
            self._check_part(message, caller)  # that gradients answer a message sent from here, the engine checks
        elif type(message) is RRefCreationFailed:  # keeps an error, as a call would
            self._check_reference(peer, message.rref_id, message.fork_id, caller, again=True)
        elif type(message) is RRefFlush:
            if self._agent.directory.by_id(worker_id_of(message.dead)) is None:
                raise CallRefused("rule 'own references': it asks about a worker that is not known here")
        elif type(message) is RRefFlushed:
            if message.forks:
                raise CallRefused("rule 'own references': references are not passed on here")
        elif type(message) not in _FREE:
            raise CallRefused(f"rule 'exports only': a {type(message).__name__} is not served here")

    def _peer(self, member: "Member") -> _Peer:
        peer = self._peers.get(member.name)
        if peer is None:
            with self._lock:
                peer = self._peers.setdefault(member.name, _Peer(self.limits))
        return peer

    def _check_amounts(self, peer: _Peer, request: Request) -> None:
        """What the peer has under way, over all its connections, and what is kept for it."""
        limits, session = self.limits, request.session
        if session not in peer.sessions:
            with self._lock:
                peer.sessions.add(session)
        sessions = [session] if len(peer.sessions) == 1 else list(peer.sessions)
        if sum(len(each.requests.running) for each in sessions) > limits.running:
            raise CallRefused(f"rule 'running': {limits.running} requests of yours are under way; wait for some")
        open_ones = [each for each in sessions if not each.closed]
        if sum(len(each.requests.replies) for each in open_ones) > _MOST_REPLIES:
            raise CallRefused(f"rule 'kept_bytes': {_MOST_REPLIES} results wait for you to say that they arrived")
        if sum(_held_bytes(each) for each in open_ones) > limits.kept_bytes:
            raise CallRefused(f"rule 'kept_bytes': {limits.kept_bytes} bytes wait for you to say that they arrived")
        if not is_modest(request.frame.payload):
            raise CallRefused("rule 'max_message_bytes': more values than one message may have; send a tensor")
        if not request.frame.tensors:
            return
        nbytes, most = written_out(request.frame.tensors), self._agent.options.max_message_bytes
        if nbytes > most:  # a few bytes can say that they are to be repeated without end
            raise CallRefused(f"rule 'max_message_bytes': tensors of {nbytes} bytes, written out; at most {most}")
        if nbytes > _LARGE:
            with self._lock:
                running = {(id(each), number) for each in sessions for number in list(each.requests.running)}
                peer.arguments = {key: size for key, size in peer.arguments.items() if key in running}
                if sum(peer.arguments.values()) + nbytes > limits.kept_bytes:
                    raise CallRefused(f"rule 'kept_bytes': calls of yours with {limits.kept_bytes} bytes are under way")
                peer.arguments[id(session), request.frame.request_id] = nbytes

    def _check_call(self, peer: _Peer, request: Request, call: Any) -> None:
        if type(call) is RRefFetch:
            _check_own(call.rref_id, request.caller)
            if call.rref_id not in peer.references:  # or it would be waited for, as one that is still to be made
                raise CallRefused(f"rule 'own references': nothing is kept for you as reference {call.rref_id}")
            return
        if type(call) not in (PythonCall, PythonRemoteCall):
            raise CallRefused(f"rule 'exports only': a {type(call).__name__} is not served here")
        definition = request.session.functions.definition(call.function)
        if definition is not None:
            find_export(definition, request.caller.name)
        else:
            raise CallRefused("rule 'exports only': a function came by value; call exported names alone")
        if type(call) is PythonRemoteCall:
            self._check_reference(peer, call.rref_id, call.fork_id, request.caller)

    def _check_reference(
        self, peer: _Peer, rref_id: int, fork_id: int, caller: "Member", *, again: bool = False
    ) -> None:
        """A reference is made, or said to be never made; that may be said again of one that was."""
        _check_own(rref_id, caller)
        holder = self._agent.layers.find(ReferenceHolder)
        with self._lock:
            known = peer.references.get(rref_id)
            if known is not None:
                if again and known == fork_id:
                    return
                raise CallRefused(f"rule 'own references': reference {rref_id} exists already")
            if len(peer.references) >= self.limits.references and holder is not None:
                # Whether one is gone the ledger knows: that its holder says so is not enough.
                peer.references = {rref: fork for rref, fork in peer.references.items() if holder.keeps(rref)}
            if not again and sum(self._held_for(peer).values()) >= self.limits.kept_bytes:
                raise CallRefused(self._too_much_is_held())
            if len(peer.references) >= self.limits.references:
                raise CallRefused(f"rule 'references': {self.limits.references} results are kept for you already")
            peer.references[rref_id] = fork_id

    def keep(self, request: Request, rref_id: int, value: Any) -> None:
        """A value was made that is to be kept for a reference. CallRefused if that is more than its peer may have."""
        peer, held = self._peer(request.caller), held_by(value)
        with self._lock:
            if sum({**self._held_for(peer), **held}.values()) > self.limits.kept_bytes:
                raise CallRefused(self._too_much_is_held())
            peer.held[rref_id] = held

    def _held_for(self, peer: _Peer) -> dict[int, int]:
        """Under the lock: bytes of the values that are kept for a peer's references, each storage once."""
        holder = self._agent.layers.find(ReferenceHolder)
        if holder is not None:
            peer.held = {rref: held for rref, held in peer.held.items() if holder.keeps(rref)}
        together: dict[int, int] = {}
        for held in peer.held.values():
            together.update(held)
        return together

    def _too_much_is_held(self) -> str:
        return f"rule 'kept_bytes': values of your references hold {self.limits.kept_bytes} bytes; let go of some"

    def _check_context(self, peer: _Peer, context_id: int, nbytes: int) -> None:
        """A call in a context, which keeps what the call brought until it ends."""
        limits = self.limits
        with self._lock:
            kept = sum([of[1] for of in peer.contexts.values()])
            if len(peer.contexts) >= limits.contexts or kept + nbytes > limits.kept_bytes:
                peer.contexts = {known: of for known, of in peer.contexts.items() if self._has_part(known)}
            if context_id not in peer.contexts and len(peer.contexts) >= limits.contexts:
                raise CallRefused(f"rule 'contexts': {limits.contexts} contexts of yours are open here")
            if sum([of[1] for of in peer.contexts.values()]) + nbytes > limits.kept_bytes:
                raise CallRefused(f"rule 'kept_bytes': contexts of yours keep {limits.kept_bytes} bytes; end some")
            calls, kept = peer.contexts.get(context_id, (0, 0))
            if calls >= limits.context_calls:
                raise CallRefused(
                    f"rule 'context_calls': {calls} calls of yours in context {context_id}; begin another"
                )
            peer.contexts[context_id] = [calls + 1, kept + nbytes]

    def _check_part(self, message: Any, caller: "Member") -> None:
        """A message about a context: both have a part in it, or it is refused."""
        metadata = getattr(message, "metadata", message)
        context_id = metadata.context_id
        holder = self._agent.layers.find(ContextHolder)
        if holder is None or holder.get(context_id) is None:
            if type(message) in _OVER_CONTEXTS:
                raise CallRefused(f"rule 'own contexts': this worker has no part in context {context_id}")
        elif not holder.has_part(context_id, caller.worker_id):
            raise CallRefused(f"rule 'own contexts': worker {caller.name!r} has no part in context {context_id}")
        if type(message) is RRefBackward:
            _check_own(message.rref_id, caller)
        elif type(message) in _OVER_CONTEXTS and self._agent.directory.by_id(message.root) is None:
            raise CallRefused(f"rule 'own contexts': worker {message.root}, the root of the pass, is not known here")

    def _is_shared(self, message: CleanupAutogradContext, caller: "Member") -> bool:
        """Whether both have a part in the context."""
        holder = self._agent.layers.find(ContextHolder)
        known = holder is not None and holder.get(message.context_id) is not None
        return known and holder is not None and holder.has_part(message.context_id, caller.worker_id)

    def _has_part(self, context_id: int) -> bool:
        holder = self._agent.layers.find(ContextHolder)
        return holder is not None and holder.get(context_id) is not None


def install_guard(agent: "Agent") -> None:
    """Put on an agent what its options ask for. Before it is started: sessions and links look once."""
    options, layers = agent.options, agent.layers
    guard = Guard(agent, options.limits) if options.exports_only else None
    audit = None if options.audit is None else Audit(agent.info.name, options.audit)
    if audit is not None:
        agent.install(audit)

    def look(request: Request) -> None:
        if guard is not None:
            guard.check_rate(request)
        if audit is not None:
            audit.asked(request)
        if guard is not None:
            guard.check(request)

    if guard is not None or audit is not None:
        layers.before_serving = look
    layers.before_keeping = None if guard is None else guard.keep
    layers.plain, layers.audit = guard is not None, audit


def _held_bytes(session: Any) -> int:
    """Bytes of the replies that are kept for a caller: frames, or payload and memory of the tensors."""
    held = 0
    for reply in list(session.requests.replies.values()):
        if type(reply) is bytes:
            held += len(reply)
        else:
            _, _, _, payload, _, memory = reply
            held += len(payload) + (len(memory) if isinstance(memory, bytes) else sum(s.nbytes for s in memory))
    return held


def _check_own(rref_id: int, caller: "Member") -> None:
    if worker_of(rref_id) != caller.worker_id:
        raise CallRefused(f"rule 'own references': reference {rref_id} was not made by worker {caller.name!r}")
