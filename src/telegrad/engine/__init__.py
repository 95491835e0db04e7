"""The distributed backward pass."""

from functools import partial

from telegrad.autograd.attach import install as install_autograd
from telegrad.autograd.registry import registry_of
from telegrad.engine.backward import backward, backward_async
from telegrad.engine.cleanup import end_context, serve_cleanup
from telegrad.engine.rref_backward import install as install_rref_backward
from telegrad.engine.service import Service
from telegrad.rpc.agent import Agent
from telegrad.wire.messages import (
    AbortPass,
    BeginPass,
    CleanupAutogradContext,
    ParticipantDied,
    PropagateGradients,
    TooLateForPass,
)

__all__ = ["backward", "backward_async", "end_context", "install"]


def install(agent: Agent) -> None:
    """Put autograd and the engine on an agent."""
    install_autograd(agent)
    registry_of(agent).end_everywhere = partial(end_context, agent)
    service = Service(agent)
    agent.extensions[Service] = service
    registry_of(agent).lost = service.lost
    agent.handlers[BeginPass] = service.serve_begin
    agent.handlers[PropagateGradients] = service.serve_gradients
    agent.handlers[TooLateForPass] = service.serve_too_late
    agent.handlers[AbortPass] = service.serve_abort
    agent.handlers[ParticipantDied] = service.serve_participant_died
    agent.handlers[CleanupAutogradContext] = lambda request: serve_cleanup(agent, request)
    agent.on_death.append(service.lost)
    agent.wait_sources.append(service.waits)
    install_rref_backward(agent)
