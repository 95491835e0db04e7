"""What a call records: hooks that see each call leave and arrive, and tie its tensors into the context.

    caller                                  callee
    tensors -> Send m1 --- RpcWithAutograd --> Recv m1 -> tensors
    tensors <- Recv m2 <-- ...Reply ---------- Send m2 <- tensors

A call outside any context passes untouched. One inside is always wrapped, even without tensors that require grad: the
function may use parameters, or call on to others, and both must happen in the caller's context.
"""

import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.functions import SendNode, attach_recv
from telegrad.autograd.registry import Registry, current, registry_of, within
from telegrad.errors import AutogradError, ProtocolError
from telegrad.ids import MessageId, WorkerId
from telegrad.rpc.agent import Agent, OnReply
from telegrad.rpc.session import Request
from telegrad.wire.frames import Frame
from telegrad.wire.messages import (
    AnyMessage,
    AutogradMetadata,
    PythonCall,
    PythonRemoteCall,
    RpcWithAutograd,
    RpcWithAutogradReply,
    RRefFetch,
)
from telegrad.wire.specs import Flag


def install(agent: Agent) -> None:
    """Put the autograd layer on an agent."""
    registry = Registry(agent)
    agent.extensions[Registry] = registry
    agent.call_hooks.append(lambda to, message, tensors: record_call(registry, to, message, tensors))
    agent.handlers[RpcWithAutograd] = lambda request: serve_recorded(agent, request)
    agent.on_late_reply.append(lambda frame, sender: note_orphan(registry, frame, sender))
    agent.on_close.append(lambda: [registry.end(context.context_id) for context in registry.contexts()])


def record_call(
    registry: Registry, to: WorkerId, message: AnyMessage, tensors: list[Tensor]
) -> tuple[AnyMessage, OnReply] | None:
    """The hook on calls going out."""
    context = current.get()
    if context is None:
        return None
    if not torch.is_grad_enabled():
        return message, _WithoutGrad()
    if not isinstance(message, PythonCall | PythonRemoteCall | RRefFetch):
        return None
    context.check_usable()
    metadata = _record_send(registry, context, to, tensors)
    context.participants.add(to)
    context.call_begins()
    return RpcWithAutograd(metadata, message), _Replied(context, to)


class _WithoutGrad:
    """Under `no_grad` a result must not require grad, as it would not in one process."""

    def __call__(self, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, list[Tensor]]:
        return message, [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]

    def close(self) -> None:
        """Nothing was recorded."""


def _record_send(registry: Registry, context: Context, to: WorkerId, tensors: list[Tensor]) -> AutogradMetadata:
    message_id = registry.next_message_id()
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if differentiable:
        context.add_send(SendNode(message_id, to, differentiable))
    return AutogradMetadata(context.context_id, message_id)


def _record_recv(context: Context, sender: WorkerId, message_id: MessageId, tensors: list[Tensor]) -> list[Tensor]:
    """Put the tensors that required grad at their sender behind a Recv."""
    positions = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not positions:
        return tensors
    plain = [tensors[i].detach() if type(tensors[i]) is not Tensor else tensors[i].requires_grad_(False) for i in positions]
    attached, recv = attach_recv(plain, message_id, sender)
    context.add_recv(recv)
    tensors = list(tensors)
    for position, tensor in zip(positions, attached, strict=True):
        tensors[position] = tensor
    return tensors


class _Replied:
    """What happens when the reply of a recorded call comes, or fails to come; exactly one of both."""

    __slots__ = ("_context", "_open", "_to")

    def __init__(self, context: Context, to: WorkerId) -> None:
        self._context = context
        self._to = to
        self._open = True

    def __call__(self, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, list[Tensor]]:
        if type(message) is not RpcWithAutogradReply:
            raise ProtocolError(f"worker {self._to} answered a call of context {self._context.context_id} with {message}")
        self._context.touch(message.participants)
        attached = _record_recv(self._context, self._to, message.metadata.message_id, tensors)
        self.close()
        return message.reply, attached

    def close(self) -> None:
        """The call is over, with or without a reply."""
        if self._open:
            self._open = False
            self._context.call_ends()


def serve_recorded(agent: Agent, request: Request) -> None:
    """The handler of `RpcWithAutograd`: tie the call into its context, then let the handler of the inner call run it."""
    message = request.message
    assert type(message) is RpcWithAutograd
    registry = registry_of(agent)
    context = registry.join(message.metadata.context_id)
    context.check_usable()
    caller = request.caller.worker_id
    context.participants.add(caller)
    message_id = message.metadata.message_id

    def on_reply(reply: AnyMessage, tensors: list[Tensor]) -> AnyMessage:
        if context.ended:
            raise AutogradError(f"context {context.context_id} ended before a call in it had returned")
        metadata = _record_send(registry, context, caller, tensors)
        others = context.participants
        return RpcWithAutogradReply(metadata, reply, tuple(others) if len(others) > 1 else ())  # type: ignore[arg-type]

    request.message = message.call
    request.on_tensors = lambda tensors: _record_recv(context, caller, message_id, tensors)
    request.on_reply = on_reply
    request.scope = lambda: within(context)
    agent.serve(request)


def note_orphan(registry: Registry, frame: Frame, sender: WorkerId) -> None:
    """A reply came after its caller had given up: its tensors are lost, and their Send must hear so in a pass."""
    message = frame.message
    if type(message) is not RpcWithAutogradReply or not any(spec.flags & Flag.REQUIRES_GRAD for spec in frame.tensors):
        return
    context = registry.get(message.metadata.context_id)
    if context is not None:
        context.touch(message.participants)
        context.orphans[message.metadata.message_id] = sender
