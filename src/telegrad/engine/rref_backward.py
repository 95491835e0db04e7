"""`rref.backward()`: a backward pass that starts where a referenced value lives."""

import threading
import time
from functools import partial
from typing import Any

import torch

from telegrad.autograd.registry import within
from telegrad.engine.backward import backward
from telegrad.errors import RpcTimeout, RRefError
from telegrad.ids import ContextId, show_id
from telegrad.rpc.agent import Agent
from telegrad.rpc.calls import rpc_sync
from telegrad.rpc.options import DEFAULT_RPC_TIMEOUT_SEC
from telegrad.rpc.request import Request
from telegrad.rpc.workers import peer_of
from telegrad.rref import RRef, rrefs_of
from telegrad.rref.outcome import Outcome
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
    agent = handle.rrefs.agent
    handle.check_usable("backward()")
    message = RRefBackward(handle.rref_id, ContextId(context_id), retain_graph)
    # The owner is the root and keeps the deadline of the pass; its error is the reply.
    agent.ask(handle.owner, message, timeout=0.0, what=lambda: f"the backward pass of context {context_id} from {rref}")


def serve_backward(agent: Agent, request: Request) -> None:
    """The handler of `RRefBackward`."""
    message = request.message
    assert type(message) is RRefBackward
    outcome = rrefs_of(agent).value_for(message.rref_id, peer_of(request.caller))
    if outcome.done:
        _run(agent, request, message, outcome)
        return
    # No thread waits for it: what makes the value may need one, and a peer may ask for values that nobody makes.
    turn = threading.Lock()  # of whichever comes first, the value or the deadline

    def made() -> None:
        if turn.acquire(blocking=False):
            agent.io_threads.submit(run)

    def run() -> None:
        try:
            _run(agent, request, message, outcome)
        except BaseException as error:
            agent.fail(request, error)

    def too_late() -> None:
        if turn.acquire(blocking=False):
            text = f"no value of reference {show_id(message.rref_id)} was made within {seconds:g} s; there is no pass"
            agent.io_threads.submit(partial(agent.fail, request, RpcTimeout(text)))

    outcome.when_done(made)
    seconds = agent.rpc_timeout or DEFAULT_RPC_TIMEOUT_SEC
    agent.timer.at(time.monotonic() + seconds, too_late)


def _run(agent: Agent, request: Request, message: RRefBackward, outcome: Outcome) -> None:
    value = outcome.get()
    if not isinstance(value, torch.Tensor):
        raise RRefError("RRef should contain a tensor for .backward()")
    backward(message.context_id, [value], message.retain_graph)
    agent.reply(request, RRefBackwardReply())
