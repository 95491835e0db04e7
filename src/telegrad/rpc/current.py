"""The agent of this process. A forked child starts without one: the threads of its parent's did not come along."""

import os

from telegrad.errors import NotInitialized
from telegrad.rpc.agent import Agent


class _Current:
    agent: Agent | None = None


running = _Current()


def current_agent() -> Agent | None:
    """The running agent, or None."""
    return running.agent


def require_agent() -> Agent:
    """The running agent; NotInitialized if there is none."""
    agent = running.agent
    if agent is None:
        raise NotInitialized(
            "RPC has not been initialized in this process. Call `rpc.init_rpc(name)` first, or use "
            "`with telegrad.local_cluster(workers=2):`. (Current RPC agent is not set! Did you initialize the RPC "
            "framework? A forked child has to do so again.)"
        )
    return agent


def set_current_agent(agent: Agent | None) -> None:
    """Install an agent, or none."""
    running.agent = agent


os.register_at_fork(after_in_child=lambda: set_current_agent(None))
