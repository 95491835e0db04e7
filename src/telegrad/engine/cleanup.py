"""The end of a context: the worker that opened it tells the others, and every one of them lets go of everything."""

from telegrad.engine.passes import MOST_NAMED
from telegrad.engine.service import PassService
from telegrad.ids import ContextId, WorkerId
from telegrad.rpc.request import Request
from telegrad.wire.messages import CleanupAutogradContext, CleanupAutogradContextReply


def end_context(service: PassService, context_id: ContextId, told: tuple[WorkerId, ...] = ()) -> None:
    """Forget a context here and, without waiting for it, on all workers it reached but those that have been `told`."""
    # First: one that comes to know of it from here on sees that it has ended.
    context = service.registry.end(context_id)
    if context is None:
        return
    here, agent = context.here, service.agent
    newcomers = context.participants.difference(told, (here,))
    if not newcomers or agent.closing:
        return
    # Of many only this one is named, as in `Pass.named`; who has forgotten the context already tells nobody.
    known = (*told, *newcomers, here)
    message = CleanupAutogradContext(context_id, known if len(known) <= MOST_NAMED else (here,))
    for worker in newcomers:
        agent.mention(worker, message)


def serve_cleanup(service: PassService, request: Request) -> None:
    """The handler of `CleanupAutogradContext`."""
    message: CleanupAutogradContext = request.message  # type: ignore[assignment] # this is what it is registered for
    end_context(service, message.context_id, message.told)
    request.reply(CleanupAutogradContextReply())
