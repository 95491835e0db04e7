"""The distributed backward pass."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from telegrad.autograd.attach import install as install_autograd
from telegrad.autograd.context import Context
from telegrad.autograd.registry import ContextEngine
from telegrad.engine.backward import RecordedPasses, backward, backward_async
from telegrad.engine.checkpoints import install as install_checkpoints
from telegrad.engine.cleanup import end_context, serve_cleanup, serve_cleanups
from telegrad.engine.higher.grad import grad, hvp, vjp
from telegrad.engine.higher.service import RecordingService
from telegrad.engine.root_pass import RootPass
from telegrad.engine.rref_backward import backward_from, serve_backward
from telegrad.engine.service import PassService
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import Served
from telegrad.rpc.request import Request
from telegrad.rpc.workers import Member
from telegrad.rref.rref import BackwardRunner, RRef
from telegrad.wire.messages import (
    AbortPass,
    BeginPass,
    CleanupAutogradContext,
    CleanupAutogradContexts,
    ParticipantDied,
    PropagateGradients,
    RRefBackward,
    TooLateForPass,
    WithGraph,
)

__all__ = ["EngineLayer", "backward", "backward_async", "end_context", "grad", "hvp", "install", "vjp"]


class EngineLayer(PassService, ContextEngine, RecordedPasses, BackwardRunner):
    """The passes of an agent, with all that they answer, and what the layers below ask of them."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.registry.take_engine(self)

    def messages(self) -> Mapping[type[Any], Served]:
        """Passes and their ends, the ends of contexts, and passes that begin at a reference."""
        return {
            BeginPass: Served(self.serve_begin),
            PropagateGradients: Served(self.serve_gradients),
            TooLateForPass: Served(self.serve_too_late),
            AbortPass: Served(self.serve_abort),
            ParticipantDied: Served(self.serve_participant_died),
            CleanupAutogradContext: Served(partial(serve_cleanup, self), deferrable=True),
            CleanupAutogradContexts: Served(partial(serve_cleanups, self), deferrable=True),
            WithGraph: Served(self._serve_with_graph),
            RRefBackward: Served(partial(serve_backward, self.agent)),
        }

    def open_recording(self, context: Context, timeout: float) -> RootPass:
        """A new pass whose root is here and whose gradients have a graph."""
        service = RecordingService.of(self)
        return service.open_recorded(context, service.next_pass_id(), True, timeout, True, None)

    def _serve_with_graph(self, request: Request) -> None:
        RecordingService.of(self).serve_with_graph(request)

    def on_death(self, member: Member) -> None:
        """Contexts that the worker opened end, those it had a part in fail."""
        self.lost(member)

    def participant_lost(self, member: Member) -> None:
        """The same, of one that is found to have a part in a context after its end was told."""
        self.lost(member)

    end_everywhere = end_context  # not by way of a method: every context ends

    def backward_from(self, rref: RRef[Any], context_id: int, retain_graph: bool, create_graph: bool) -> None:
        """Run a pass whose root is a reference."""
        backward_from(rref, context_id, retain_graph, create_graph)


def install(agent: Agent) -> None:
    """Put autograd and the engine on an agent."""
    install_autograd(agent)
    install_checkpoints()
    agent.install(EngineLayer(agent))
