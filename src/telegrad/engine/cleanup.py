"""The end of a context: the worker that opened it tells the others, and every one of them lets go of everything."""

from telegrad.autograd.context import Context
from telegrad.autograd.registry import Registry
from telegrad.engine.service import Service
from telegrad.ids import ContextId, WorkerId
from telegrad.rpc.agent import Agent
from telegrad.rpc.request import Request
from telegrad.wire.messages import CleanupAutogradContext, CleanupAutogradContextReply


def end_context(agent: Agent, context_id: ContextId) -> None:
    """Forget a context here and, without waiting for it, on all workers it reached."""
    _forget(agent, context_id, ())


def serve_cleanup(agent: Agent, request: Request) -> None:
    """The handler of `CleanupAutogradContext`."""
    message = request.message
    assert type(message) is CleanupAutogradContext
    _forget(agent, message.context_id, message.told)
    agent.reply(request, CleanupAutogradContextReply())


def _forget(agent: Agent, context_id: ContextId, told: tuple[WorkerId, ...]) -> None:
    registry, service = agent.layer(Registry), agent.layer(Service)
    context = registry.end(context_id)  # first: one that comes to know of it from here on sees that it has ended
    participants = set() if context is None else _others(context)
    service.forget(context_id)
    newcomers = participants.difference(told)
    if not newcomers or agent.closing:
        return
    message = CleanupAutogradContext(context_id, (*told, *newcomers, service.here))
    for worker in newcomers:
        member = agent.directory.by_id(worker)
        if member is not None and not agent.is_dead(member):
            agent.notify(member, message, lazy=True)


def _others(context: Context) -> set[WorkerId]:
    return context.participants - {context.here}
