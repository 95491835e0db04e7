"""Several agents in one process, over the memory transport: whole calls without processes, ports or files."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

from telegrad.ids import WorkerId, draw_incarnation
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.join import install_own_layers
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.round_trip import start_call, wait_for_value
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import Listeners, host_identity

# By name, so that a function that "runs on b" finds the agent it runs on.
agents: dict[str, Agent] = {}

_generations = itertools.count()


@contextlib.contextmanager
def office(*names: str, **options: Any) -> Iterator[dict[str, Agent]]:
    """Agents that know each other, for the length of a block."""
    try:
        for worker_id, name in enumerate(names):
            agents[name] = start_agent(name, worker_id, **options)
        introduce()
        yield agents
    finally:
        for agent in agents.values():
            agent.close()
        agents.clear()


def start_agent(name: str, worker_id: int, **options: Any) -> Agent:
    """One agent, known to nobody yet."""
    given = RpcBackendOptions(**{"transports": ("memory",), "secret": "told to all", "heartbeat": 0.2, **options})
    listeners = Listeners(given.transports, "127.0.0.1")
    incarnation = draw_incarnation(next(_generations) % 1024)
    # With its process: on a busy machine a silent worker is looked up, and found to be alive.
    member = Member(
        name, WorkerId(worker_id), incarnation, tuple(listeners.addresses), os.getpid(), host=host_identity()
    )
    agent = Agent(member, b"told to all", given, listeners)
    install_own_layers(agent)
    agent.start()
    agent.start_heartbeat()
    return agent


def introduce() -> None:
    """Tell every agent of all others."""
    for agent in agents.values():
        agent.peers.learn([other.member for other in agents.values()])


def call(caller: str, to: str, func: Any, *args: Any, timeout: float = 90.0) -> Any:
    """Call a function from one agent on another, and wait."""
    agent = agents[caller]
    member = agent.find(to)
    return wait_for_value(start_call(agent, agent.link(member), func, args, {}, timeout))
