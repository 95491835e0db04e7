"""What an owner and a user answer: creations, fetches, and the messages of the protocol."""

from functools import partial
from typing import Any

from telegrad.errors import CallCancelled, CallRefused, ProtocolError, RRefError
from telegrad.rpc.layer import Served
from telegrad.rpc.packing import pack_for
from telegrad.rpc.request import Request
from telegrad.rpc.server.cancellation import FirstEnd
from telegrad.rpc.server.run_call import CallService, Later
from telegrad.rpc.workers import peer_of
from telegrad.rref.ledger.actions import Refuse, SendAck
from telegrad.rref.outcome import Outcome, RemoteFailure
from telegrad.rref.rref_context import RRefContext
from telegrad.wire.frames import FrameKind
from telegrad.wire.messages import (
    Ack,
    PythonRemoteCall,
    RRefAck,
    RRefChildAccept,
    RRefCreationFailed,
    RRefFetch,
    RRefFetchReply,
    RRefFlush,
    RRefFlushed,
    RRefForkRequest,
    RRefUserDelete,
)

_MOST_DEATHS = 1 << 16  # that are remembered here: beyond, those that nobody here has met are made up


def messages(rrefs: RRefContext) -> dict[type[Any], Served]:
    """All messages about references."""
    handlers: tuple[tuple[type[Any], Any], ...] = (
        (PythonRemoteCall, serve_creation),
        (RRefFetch, serve_fetch),
        (RRefUserDelete, serve_delete),
        (RRefForkRequest, serve_fork_request),
        (RRefCreationFailed, serve_creation_failed),
        (RRefChildAccept, serve_child_accept),
        (RRefAck, serve_ack),
        (RRefFlush, serve_flush),
        (RRefFlushed, serve_flushed),
    )
    return {message: Served(partial(handler, rrefs)) for message, handler in handlers}


def serve_creation(rrefs: RRefContext, request: Request) -> None:
    """Run a function and keep what it returns. The reply says that it has run, whether or not it raised."""
    agent, call, creator = rrefs.agent, request.message, peer_of(request.caller)
    assert type(call) is PythonRemoteCall
    if creator == rrefs.me:  # the owner holds its handle already; if it is gone, nobody will see the value
        value = rrefs.values.get(call.rref_id, Outcome())
    else:
        actions = rrefs.decide(rrefs.owned.on_create, creator, call.rref_id, call.fork_id)
        if any(type(action) is Refuse for action in actions):
            raise RRefError(f"worker {request.caller.name!r} is known to be dead here; its calls are not run")
        value = rrefs.value_of(call.rref_id)

    keep = agent.layers.before_keeping if creator != rrefs.me else None

    # The reply leaves first: whoever gets the value from here knows that its fork is confirmed.

    def done(result: Any) -> None:
        agent.reply(request, Ack())
        if keep is not None:
            try:
                keep(request, call.rref_id, result)
            except CallRefused as error:
                value.fail(RemoteFailure(request.describe(error)))
                return
        value.set(result)

    def failed(error: BaseException) -> None:
        agent.reply(request, Ack())
        value.fail(RemoteFailure(request.describe(error)))

    try:
        result = agent.layer(CallService).run(request, call)
        if type(result) is Later:
            result.give_to(done, failed, request)
        else:
            done(result)
    except Exception as error:
        failed(error)


def serve_fetch(rrefs: RRefContext, request: Request) -> None:
    """Send a value as soon as it exists. No thread waits for it."""
    message = request.message
    assert type(message) is RRefFetch
    value = rrefs.value_for(message.rref_id, peer_of(request.caller))
    if value.done:
        _send_value(rrefs, request, value)
        return
    first = FirstEnd()

    @first
    def cancel() -> None:
        """Perhaps the value never comes: a caller that was interrupted lets go of it, and that may be heard first."""
        rrefs.agent.fail(request, CallCancelled("the value was no longer waited for before it was there"))

    request.session.cancelling().on_ask(request.frame.request_id, cancel)
    value.when_done(first(partial(_send_value, rrefs, request, value)))


def _send_value(rrefs: RRefContext, request: Request, value: Outcome) -> None:
    agent = rrefs.agent
    try:
        if isinstance(value.failure, RemoteFailure):
            request.session.reply(FrameKind.FAILURE, request.frame.request_id, *value.failure.described)
            return
        packed = pack_for(agent.layers, request.caller, value.get(), request.session.main_by_value)
    except Exception as error:
        agent.fail(request, error)
        return
    agent.reply(request, RRefFetchReply(), packed)


# --- the protocol: each message is an event for a ledger ---


def serve_delete(rrefs: RRefContext, request: Request) -> None:
    """Handles of a user are gone."""
    message, sender = request.message, peer_of(request.caller)
    assert type(message) is RRefUserDelete
    for rref_id, fork_id in message.forks:
        rrefs.feed(rrefs.owned.on_delete, sender, rref_id, fork_id)
    rrefs.agent.reply(request, Ack())


def serve_fork_request(rrefs: RRefContext, request: Request) -> None:
    """A user has a handle that this owner does not know yet."""
    message, sender = request.message, peer_of(request.caller)
    assert type(message) is RRefForkRequest
    event = rrefs.owned.on_fork_request
    _acknowledge(rrefs, request, event, sender, message.rref_id, message.fork_id, message.holder)


def serve_creation_failed(rrefs: RRefContext, request: Request) -> None:
    """A value will never be made."""
    message, sender = request.message, peer_of(request.caller)
    assert type(message) is RRefCreationFailed
    _acknowledge(rrefs, request, rrefs.owned.on_creation_failed, sender, message.rref_id, message.fork_id)


def _acknowledge(rrefs: RRefContext, request: Request, event: Any, *args: Any) -> None:
    """Where the ledger decides to acknowledge to who asked, the reply is that acknowledgement."""
    reply: Ack | RRefAck = Ack()
    others = []
    for action in rrefs.decide(event, *args):
        if type(action) is SendAck and type(reply) is Ack:
            reply = RRefAck(action.rref_id, action.fork_id)
        else:
            others.append(action)
    rrefs.perform(others)
    rrefs.agent.reply(request, reply)


def serve_child_accept(rrefs: RRefContext, request: Request) -> None:
    """Owners know handles that were sent from here."""
    message = request.message
    assert type(message) is RRefChildAccept
    for fork_id in message.fork_ids:
        rrefs.feed(rrefs.used.on_child_accept, fork_id)
    rrefs.agent.reply(request, Ack())


def serve_ack(rrefs: RRefContext, request: Request) -> None:
    """An owner knows a handle that is here."""
    message = request.message
    assert type(message) is RRefAck
    rrefs.feed(rrefs.used.on_ack, peer_of(request.caller), message.rref_id, message.fork_id)
    rrefs.agent.reply(request, Ack())


def serve_flush(rrefs: RRefContext, request: Request) -> None:
    """An owner wants to hear when a death is known here, and what is then left of the dead one's handles."""
    message = request.message
    assert type(message) is RRefFlush
    dead = message.dead
    if rrefs.used.deaths >= _MOST_DEATHS and rrefs.member(dead) is None:
        raise ProtocolError(f"worker {request.caller.name!r} asks about more dead workers than there can be")
    rrefs.feed(rrefs.used.on_flush, peer_of(request.caller), dead)
    rrefs.agent.reply(request, Ack())
    rrefs.probe(dead)


def serve_flushed(rrefs: RRefContext, request: Request) -> None:
    """The answer to a flush."""
    message = request.message
    assert type(message) is RRefFlushed
    rrefs.feed(rrefs.owned.on_flushed, peer_of(request.caller), message.dead, message.forks)
    rrefs.agent.reply(request, Ack())
