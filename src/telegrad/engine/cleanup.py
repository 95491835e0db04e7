"""The end of a context: the worker that opened it tells the others, and every one of them lets go of everything.

A context's end is told with the next message to each worker. Those that end in the few ms after it are told together:
steps as short as that would spend a tenth of their work on it.
"""

import time
from collections import deque
from typing import TYPE_CHECKING

from telegrad.autograd.context import Context
from telegrad.engine.passes import MOST_NAMED
from telegrad.ids import ContextId, WorkerId
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.pending import FOREVER
from telegrad.rpc.request import Request
from telegrad.wire.messages import (
    AnyMessage,
    CleanupAutogradContext,
    CleanupAutogradContextReply,
    CleanupAutogradContexts,
)

if TYPE_CHECKING:
    from telegrad.engine.service import PassService

_SECONDS = 0.005  # in which the ends of contexts are collected
_LAST_SECONDS = 0.02  # more until the last are told, where no context ends any more
_MOST = 8  # of them: each keeps its tensors on all its workers until they are told


class EndedContexts:
    """The contexts whose end others have yet to be told. Any thread may add to them or tell: each is taken out once."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._untold: deque[tuple[Context, tuple[WorkerId, ...]]] = deque()
        self._next = 0.0  # until then they are collected
        self._look_at = FOREVER  # when the timer looks whether any are left

    def add(self, context: Context, told: tuple[WorkerId, ...]) -> None:
        """Have all it reached told, but those that have been: now, or shortly after others were told of another."""
        untold = self._untold
        untold.append((context, told))
        # Where workers do not trust each other, each end is a message of its own, whose sender is looked at.
        if len(untold) >= _MOST or time.monotonic() >= self._next or self._agent.layers.plain:
            self._tell()
        elif self._look_at == FOREVER:
            self._look_after(self._next)

    def _look_after(self, when: float) -> None:
        """Where contexts go on ending, those who end them tell. The timer, whose thread would take the interpreter from
        them, comes later, for the last."""
        self._look_at = when + _LAST_SECONDS
        self._agent.timer.at(self._look_at, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:  # else another look was asked for meanwhile, which is enough
            self._look_at = FOREVER  # first: who adds one from here on sees to it
            if self._untold and now < self._next + _SECONDS:
                self._look_after(self._next)
            elif self._untold:
                self._agent.io_threads.submit(self._tell)  # which may have to connect

    def _tell(self) -> None:
        if self._agent.closing:
            return  # its goodbye ends them all
        self._next = time.monotonic() + _SECONDS
        ended: dict[tuple[frozenset[WorkerId], tuple[WorkerId, ...]], list[ContextId]] = {}  # by whom they reached
        while self._untold:
            try:
                context, told = self._untold.popleft()
            except IndexError:  # another thread was first
                break
            ended.setdefault((frozenset(context.participants), told), []).append(context.context_id)
        for (participants, told), contexts in ended.items():
            self._tell_of(contexts, participants, told)

    def _tell_of(
        self, contexts: list[ContextId], participants: frozenset[WorkerId], told: tuple[WorkerId, ...]
    ) -> None:
        here = self._agent.member.worker_id
        newcomers = participants.difference(told, (here,))
        # Of many only this one is named, as in `Pass.named`; who has forgotten the context already tells nobody.
        known = (*told, *newcomers, here)
        named = known if len(known) <= MOST_NAMED else (here,)
        messages: list[AnyMessage]
        if len(contexts) == 1 or self._agent.layers.plain:
            messages = [CleanupAutogradContext(context_id, named) for context_id in contexts]
        else:
            messages = [CleanupAutogradContexts((*contexts,), named)]
        for worker in newcomers:
            for message in messages:
                self._agent.mention(worker, message)


def end_context(service: "PassService", context_id: ContextId, told: tuple[WorkerId, ...] = ()) -> None:
    """Forget a context here and, without waiting for it, on all workers it reached but those that have been `told`."""
    # First: one that comes to know of it from here on sees that it has ended.
    context = service.registry.end(context_id)
    if context is not None and not context.participants.issubset(told):
        service.ended.add(context, told)


def serve_cleanup(service: "PassService", request: Request) -> None:
    """The handler of `CleanupAutogradContext`."""
    message: CleanupAutogradContext = request.message  # type: ignore[assignment] # this is what it is registered for
    end_context(service, message.context_id, message.told)
    request.reply(CleanupAutogradContextReply())


def serve_cleanups(service: "PassService", request: Request) -> None:
    """The handler of `CleanupAutogradContexts`."""
    message: CleanupAutogradContexts = request.message  # type: ignore[assignment] # this is what it is registered for
    for context_id in message.contexts:
        end_context(service, context_id, message.told)
    request.reply(CleanupAutogradContextReply())
