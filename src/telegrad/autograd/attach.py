"""What a call records: the layer that sees each call leave and arrive, and ties its tensors into the context.

    caller                                  callee
    tensors -> Send m1 --- RpcWithAutograd --> Recv m1 -> tensors
    tensors <- Recv m2 <-- ...Reply ---------- Send m2 <- tensors

A call outside any context passes untouched. One inside is always wrapped, even without tensors that require grad: the
function may use parameters, or call on to others, and both must happen in the caller's context.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import compress
from operator import attrgetter, methodcaller
from typing import Any

import msgspec
import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.functions import RecvNode, SendNode, attach_recv
from telegrad.autograd.outside import leave_behind, without_grad
from telegrad.autograd.registry import Registry, current, within
from telegrad.autograd.walking import walk_ahead
from telegrad.errors import AutogradError, ProtocolError
from telegrad.ids import MAX_WORKER_ID, MessageId, WorkerId, worker_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import OnReply, Served
from telegrad.rpc.request import Request
from telegrad.rpc.threads.yield_turn import local
from telegrad.wire.frames import Frame
from telegrad.wire.messages import (
    AnyMessage,
    AutogradMetadata,
    PythonCall,
    PythonRemoteCall,
    RpcWithAutograd,
    RpcWithAutogradReply,
    RpcWithProfilingReply,
    RRefFetch,
)
from telegrad.wire.pickling.pickler import set_recording
from telegrad.wire.tensor.specs import Flag

_REQUIRES_GRAD = int(Flag.REQUIRES_GRAD)  # a plain int: arithmetic on enums costs a microsecond
_MOST_PARTICIPANTS = MAX_WORKER_ID + 1  # that a reply may name
_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_leaving_graph: Callable[[Tensor], Tensor] = methodcaller("requires_grad_", False)
_PLAIN = {Tensor}
_CALLS = {PythonCall, PythonRemoteCall, RRefFetch}


def _is_recording() -> bool:
    return current.get() is not None and torch.is_grad_enabled()


def record_call(
    registry: "AutogradLayer", to: WorkerId, message: AnyMessage, tensors: list[Tensor]
) -> tuple[AnyMessage, OnReply] | None:
    """A call goes out: wrapped if it is made in a context."""
    if not torch.is_grad_enabled():
        return message, _WITHOUT_GRAD
    context = current.get()
    if context is None:
        _check_strict(registry, to, tensors)
        return None
    if type(message) not in _CALLS:
        return None
    if not context.usable:
        context.check_usable()
    context.participants.add(to)  # before the Send: a pass that counts that one must know whom to ask
    message_id = _record_send(registry, context, to, tensors, later=True)
    metadata = AutogradMetadata(context.context_id, message_id)
    recorded = registry.recorded(context, to, message_id)
    return RpcWithAutograd(metadata, message, context.strict), recorded  # type: ignore[arg-type] # it is in _CALLS


def _check_strict(registry: Registry, to: WorkerId, tensors: list[Tensor]) -> None:
    """Outside any context nothing is recorded. While a strict one is open, that is taken for a mistake."""
    strict = registry.strict_context()
    if strict is not None and any(tensor.requires_grad for tensor in tensors):
        raise AutogradError(
            f"a tensor that requires grad was about to be sent to worker {to} outside any context, while the strict "
            f"context {strict} is open: its gradient would be lost. Make the call in the block of the context, or in "
            "the function called in it. A new thread begins outside of it: start it with "
            "threading.Thread(target=contextvars.copy_context().run, args=(function, ...)). Or send the tensor detached"
        )


class _WithoutGrad:
    """Under `no_grad` a result must not require grad, as it would not in one process."""

    def __call__(self, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, list[Tensor]]:
        return message, without_grad(tensors) if tensors else tensors

    def sent(self) -> None:
        """Nothing was recorded."""

    unsent = sent


_WITHOUT_GRAD = _WithoutGrad()


def _record_send(
    registry: Registry, context: Context, to: WorkerId, tensors: list[Tensor], later: bool = False
) -> MessageId:
    message_id = next(registry.message_ids)
    sent = [*filter(_requires_grad, tensors)]
    if sent and not context.ended:
        context.sends[message_id] = SendNode(message_id, to, sent, later)
    return message_id


def record_recv(
    context: Context,
    sender: WorkerId,
    message_id: MessageId,
    tensors: list[Tensor],
    note: Callable[[Context, RecvNode], None] = Context.add_recv,
) -> list[Tensor]:
    """Put the tensors that required grad at their sender behind a Recv."""
    if len(tensors) == 1 and type(tensors[0]) is Tensor:  # the usual case
        if tensors[0].requires_grad:
            tensors, recv = attach_recv([_leaving_graph(tensors[0])], message_id, sender)
            note(context, recv)
        return tensors
    required = [*map(_requires_grad, tensors)]
    if True not in required:
        return tensors
    behind = [*compress(tensors, required)]
    if {*map(type, behind)} == _PLAIN:
        behind = [*map(_leaving_graph, behind)]
    else:
        behind = [_of_parameter(t, tensors) if type(t) is not Tensor else _leaving_graph(t) for t in behind]
    attached, recv = attach_recv(behind, message_id, sender)
    note(context, recv)
    if False not in required:
        return attached
    left = iter(attached)
    return [next(left) if behind else tensor for tensor, behind in zip(tensors, required, strict=True)]


def _of_parameter(parameter: Tensor, tensors: list[Tensor]) -> Tensor:
    """The tensor of a parameter; a view if it may overlap another tensor of the message, as `attach_recv` wants it."""
    tensor = parameter.detach()
    if len(tensors) > 1:
        storage = tensor.untyped_storage()._cdata
        others = [other for other in tensors if other.layout is torch.strided and not other.is_nested]
        if sum(other.untyped_storage()._cdata == storage for other in others) > 1:
            return tensor.view_as(tensor)
    return tensor


class _Recorded(msgspec.Struct, eq=False):
    """A recorded call on its way: what its reply adds to the context, and what is to be done if it cannot be sent."""

    _context: Context
    _to: WorkerId
    _message_id: MessageId

    def __call__(self, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, list[Tensor]]:
        if type(message) is not RpcWithAutogradReply:
            raise ProtocolError(
                f"worker {self._to} answered a call of context {self._context.context_id} with {message}"
            )
        context, message_id = self._context, message.metadata.message_id
        if message.participants:
            context.participants.update(message.participants)
        try:
            return message.reply, record_recv(context, self._to, message_id, tensors, Context.arrived_with)
        except BaseException:
            context.arrived(message_id, self._to)  # its Send must hear from here, with or without a Recv
            raise

    def sent(self) -> None:
        """The call has left: now there is time to look where the gradients of its tensors will go."""
        send = self._context.sends.get(self._message_id)
        if send is not None:
            send.resolve()

    def unsent(self) -> None:
        """The call did not leave: nobody will ever return gradients for its tensors."""
        self._context.unsent.add(self._message_id)
        self.sent()


class _RecordedForStranger(_Recorded, eq=False):
    """The same where the worker that was called is not trusted: it names messages of its own alone, and workers that
    there are."""

    def __call__(self, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, list[Tensor]]:
        if type(message) is RpcWithAutogradReply:
            if worker_of(message.metadata.message_id) != self._to:
                raise ProtocolError(f"worker {self._to} answered with a message of another: {message.metadata}")
            if len(message.participants) > _MOST_PARTICIPANTS:
                raise ProtocolError(f"worker {self._to} names {len(message.participants)} workers of one context")
        return _Recorded.__call__(self, message, tensors)


def serve_recorded(registry: Registry, request: Request) -> None:
    """The handler of `RpcWithAutograd`: tie the call into its context, then let the inner call's handler run it."""
    message: RpcWithAutograd = request.message  # type: ignore[assignment] # this is what it is registered for
    metadata, member = message.metadata, request.session.member
    context = registry.join(metadata.context_id)
    if not context.usable:
        context.check_usable()
    if message.strict and not context.strict and not registry.agent.layers.plain:  # it binds all calls from here
        registry.make_strict(context)
    caller = member.worker_id
    context.participants.add(caller)
    if registry.agent.is_dead(member):  # its end was told before it was known to have a part in this
        registry.participant_lost(member)
    if _has_gradients(request.frame):
        # Before anything else can fail: its Send must hear from here, with or without a Recv.
        context.arrived(metadata.message_id, caller)
    request.message = message.call
    request.on_tensors = partial(record_recv, context, caller, metadata.message_id)
    request.on_reply = partial(_record_reply, registry, context, caller)
    request.scope = partial(within, context)
    request.session.serve_inner(request)
    answered, turn = context.answered, local.turn
    if answered is not None and turn is not None and not turn.owes:  # it has left, and no request waits behind it
        context.answered = None
        walk_ahead(context, answered)


def _record_reply(
    registry: Registry, context: Context, caller: WorkerId, reply: AnyMessage, tensors: list[Tensor]
) -> AnyMessage:
    """The reply of a recorded call goes out: wrapped."""
    if context.ended:
        raise AutogradError(f"context {context.context_id} ended before a call in it had returned")
    message_id = context.answered = _record_send(registry, context, caller, tensors)
    metadata = AutogradMetadata(context.context_id, message_id)
    others = context.participants
    named = tuple(others) if len(others) > 1 else ()
    return RpcWithAutogradReply(metadata, reply, named)  # type: ignore[arg-type] # the reply of a call


def note_orphan(registry: Registry, frame: Frame, sender: WorkerId) -> None:
    """A reply came after its caller had given up: its tensors are lost, and their Send must hear so in a pass."""
    message = frame.message.reply if type(frame.message) is RpcWithProfilingReply else frame.message
    if type(message) is not RpcWithAutogradReply or not _has_gradients(frame):
        return
    context = registry.get(message.metadata.context_id)
    if context is not None and (not registry.agent.layers.plain or sender in context.participants):
        context.touch(message.participants)
        context.arrived(message.metadata.message_id, sender)


def _has_gradients(frame: Frame) -> bool:
    """Whether a message has tensors that require grad, so that there is a Send that waits to hear."""
    for spec in frame.tensors:  # noqa: SIM110 - on the path of every recorded call
        if spec.flags & _REQUIRES_GRAD:
            return True
    return False


class AutogradLayer(Registry):
    """The contexts of an agent, with what records calls in them."""

    recorded: type[_Recorded] = _Recorded

    def messages(self) -> Mapping[type[Any], Served]:
        """Calls that are recorded."""
        return {RpcWithAutograd: Served(partial(serve_recorded, self))}

    wrap_call = record_call  # not by way of a method: it is on the path of every call

    def on_plain_reply(self, what: Callable[[], str], tensors: list[Tensor]) -> list[Tensor]:
        """Of a call outside any context."""
        return leave_behind(what, tensors)

    def on_late_reply(self, frame: Frame, sender: WorkerId) -> None:
        """Its tensors are lost, and their Send must hear so."""
        note_orphan(self, frame, sender)


def install(agent: Agent) -> None:
    """Put the autograd layer on an agent."""
    set_recording(_is_recording)
    layer = AutogradLayer(agent)
    if agent.layers.plain:
        layer.hide_numbers()
        layer.recorded = _RecordedForStranger
    agent.install(layer)
