"""The contexts of one worker, and which of them the running code is in.

The current context belongs to the flow of control, not to the thread: a coroutine keeps its own, and a thread that a
user starts begins outside any.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from numbers import Integral

from telegrad.autograd.context import Context
from telegrad.errors import AutogradError, ContextNotFound
from telegrad.ids import ContextId, MessageId, WorkerId, ids_of, number_of, random_ids_of, worker_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent, running
from telegrad.rpc.layer import Layer
from telegrad.rpc.trust.guard import ContextHolder
from telegrad.rpc.workers import Member, peer_of

log = logging.getLogger("telegrad.autograd")

current: ContextVar[Context | None] = ContextVar("telegrad_context", default=None)

_ENDED_MEMORY = 4096
MOST_CONTEXTS = 16384  # that others may begin here


class ContextEngine(Layer):
    """What contexts ask of the layer that runs passes over them; it derives from this."""

    def end_everywhere(self, context_id: ContextId) -> None:
        """Forget a context here and on all workers it reached."""
        raise NotImplementedError

    def participant_lost(self, member: Member) -> None:
        """A worker that is known to be dead turns out to have a part in a context here."""
        raise NotImplementedError


class Registry(ContextHolder):
    """The contexts of one agent.

    A context begins and ends without a lock, by single operations on tables in this order: who ends it says so in
    `_ended` before taking it out of `_contexts`, and who begins it looks at `_ended` after putting it there.
    """

    engine: ContextEngine | None = None

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.here = agent.member.worker_id
        me = peer_of(agent.member)
        self._context_ids: Iterator[ContextId] = ids_of(me)
        self.message_ids: Iterator[MessageId] = ids_of(me)  # of this worker's Sends
        self._lock = threading.Lock()  # of those who forget what has ended
        self._contexts: dict[int, Context] = {}
        self._look_up = self._contexts.get
        self._strict: dict[ContextId, None] = {}  # those that are strict
        # Contexts that ended here lately, oldest first: a late message must not bring one back.
        self._ended: dict[ContextId, None] = {}
        # End a context of this worker's own, on all workers it reached: what that takes, the engine knows.
        self.end_everywhere: Callable[[ContextId], object] = self.end

    def take_engine(self, engine: ContextEngine) -> None:
        """What runs passes puts itself here."""
        self.engine = engine
        self.end_everywhere = engine.end_everywhere

    def __len__(self) -> int:
        return len(self._contexts)

    def hide_numbers(self) -> None:
        """Where the parties do not trust each other: draw contexts' ids, so that who knows one was told it."""
        self._context_ids = random_ids_of(peer_of(self.agent.member))

    def next_message_id(self) -> MessageId:
        """An id for a Send of this worker."""
        return next(self.message_ids)

    def open(self, strict: bool = False) -> Context:
        """A new context of this worker's own."""
        context_id = next(self._context_ids)
        self._contexts[context_id] = context = Context(context_id, self.here)
        if strict:
            self.make_strict(context)
        return context

    def make_strict(self, context: Context) -> None:
        """Tensors that require grad must not be sent outside any context while this one is open."""
        context.strict = True
        self._strict[context.context_id] = None

    def strict_context(self) -> ContextId | None:
        """A strict context that is open on this worker, if there is one."""
        return next(iter(self._strict), None) if self._strict else None

    def join(self, context_id: ContextId) -> Context:
        """The context a call belongs to; begun here if this is the first call in it that reaches this worker."""
        context = self._contexts.get(context_id)
        if context is not None:
            return context
        if len(self._contexts) >= MOST_CONTEXTS:
            raise AutogradError(
                f"worker {self.agent.info.name!r} has a part in {MOST_CONTEXTS} contexts that have not ended; it "
                "takes part in no more"
            )
        context = self._contexts.setdefault(context_id, Context(context_id, self.here))
        if context_id in self._ended:
            self._contexts.pop(context_id, None)
            raise ContextNotFound(
                f"context {context_id} has ended; a call in it reached worker {self.agent.info.name!r} too late"
            )
        return context

    def find(self, context_id: int) -> Context:
        """A context that must exist."""
        try:
            context = self._look_up(context_id)
            if context is not None:
                return context
        except TypeError:  # not hashable, and so no id
            pass
        if not isinstance(context_id, Integral):
            raise TypeError(
                "the first argument is the id that `with autograd.context() as context_id` gives, got an object of "
                f"{type(context_id).__name__}"
            )
        raise ContextNotFound(
            f"Could not find autograd context with id: {context_id} on worker {self.agent.info.name!r}: it has "
            f"ended, or never was (it would be number {number_of(context_id)} of worker {worker_of(context_id)})"
        )

    def get(self, context_id: int) -> Context | None:
        """A context, if it exists."""
        return self._contexts.get(context_id)

    def has_part(self, context_id: int, worker_id: int) -> bool:
        """Whether a worker is known to have a part in a context that is known here."""
        context = self.get(context_id)
        return context is not None and (context.opened_by == worker_id or WorkerId(worker_id) in context.participants)

    def end(self, context_id: ContextId) -> Context | None:
        """Forget a context; what it was, if it was there."""
        self._ended[context_id] = None
        if len(self._ended) > _ENDED_MEMORY:
            self._forget_oldest()
        context = self._contexts.pop(context_id, None)
        if self._strict:
            self._strict.pop(context_id, None)
        if context is not None:
            context.end()
        return context

    def _forget_oldest(self) -> None:
        with self._lock:
            for context_id in [*self._ended][: _ENDED_MEMORY // 8]:
                self._ended.pop(context_id, None)

    def participant_lost(self, member: Member) -> None:
        """A worker that is known to be dead turns out to have a part in a context here."""
        if self.engine is not None:
            self.engine.participant_lost(member)

    def on_close(self) -> None:
        """The worker shuts down: nothing of any context is of use any more."""
        for context in self.contexts():
            context.latest = None  # a pass that runs fails with the links it waits for, and others hear why
            self.end(context.context_id)

    def contexts(self) -> list[Context]:
        """All contexts here."""
        return list(self._contexts.values())


class within:  # noqa: N801 - used like a function; a class, because it is on the path of every recorded call
    """`with within(context):` runs code in a context that came with a call."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context | None) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = current.set(self._context)

    def __exit__(self, *_: object) -> None:
        current.reset(self._token)


def registry_of(agent: Agent) -> Registry:
    """The registry of an agent."""
    return agent.layer(Registry)


def registry() -> Registry:
    """The registry of this process's agent."""
    return (running.agent or require_agent()).layer(Registry)
