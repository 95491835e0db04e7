"""`rref.backward()`: a backward pass that starts where a referenced value lives."""

from typing import Any

import torch

from telegrad.autograd.registry import within
from telegrad.engine.backward import backward
from telegrad.errors import RRefError
from telegrad.ids import ContextId
from telegrad.rpc.agent import Agent
from telegrad.rpc.calls import rpc_sync
from telegrad.rpc.server.request import Request
from telegrad.rref import RRef, references_of
from telegrad.wire.messages import RRefBackward, RRefBackwardReply


def backward_from(rref: RRef[Any], context_id: int, retain_graph: bool, create_graph: bool = False) -> None:
    """Run the pass at the owner of `rref`: here, or by asking it."""
    if rref.is_owner():
        backward(context_id, [rref.local_value()], retain_graph, create_graph=create_graph)
        return
    if create_graph:
        with within(None):  # no part of the context itself
            rpc_sync(rref.owner(), backward_from, args=[rref, context_id, retain_graph, True], timeout=0)
        return
    handle = rref._handle
    agent = handle.references.agent
    handle.check_usable("backward()")
    message = RRefBackward(handle.rref_id, ContextId(context_id), retain_graph)
    # The owner is the root and minds the time of the pass; its error is the reply.
    agent.ask(handle.owner, message, timeout=0.0, what=lambda: f"the backward pass of context {context_id} from {rref}")


def serve_backward(agent: Agent, request: Request) -> None:
    """The handler of `RRefBackward`."""
    message = request.message
    assert type(message) is RRefBackward
    outcome = references_of(agent).value_of(message.rref_id)
    outcome.wait()
    value = outcome.get()
    if not isinstance(value, torch.Tensor):
        raise RRefError("RRef should contain a tensor for .backward()")
    backward(message.context_id, [value], message.retain_graph)
    agent.reply(request, RRefBackwardReply())
