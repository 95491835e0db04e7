"""`serve` keeps a worker there while a run needs it, also while the run's driver is dead and about to come back.

A graceful `rpc.shutdown()` waits for the living: with the driver dead, and all others waiting in it, it would be over.
So a worker that does nothing but serve a durable run calls `durable.serve()` first, and `rpc.shutdown()` then.
"""

import time
from collections.abc import Collection

from telegrad.durable.part import parts_of
from telegrad.errors import TelegradError, WorkerDied
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.job.barrier import Barriers
from telegrad.rpc.workers import Member
from telegrad.wire.messages import Barrier, BarrierReply

_LOOK_SECONDS = 0.2
_ASK_SECONDS = 5.0
_BARRIER = "shutdown/0"  # where all wait who have come to their graceful shutdown


def serve(patience: float = 300.0) -> None:
    """Serve until all durable runs here have been closed by their drivers, and somebody shuts down.

    In a job of open size, where each leaves alone, it returns when the runs are closed. A driver that died is waited
    for up to `patience` seconds; WorkerDied names it then.

    Examples:
        ```python
        rpc.init_rpc("worker1")
        durable.serve()  # instead of work of its own
        rpc.shutdown()
        ```
    """
    agent = require_agent()
    parts = parts_of(agent)
    gone_since: dict[str, float] = {}
    while True:
        drivers = {part.driver for part in list(parts.by_run.values()) if part.driver}
        if not drivers and (parts.closed if agent.world_size is None else _somebody_shuts_down(agent)):
            return
        _check_patience(agent, drivers, gone_since, patience)
        time.sleep(_LOOK_SECONDS)


def _check_patience(agent: Agent, drivers: set[str], gone_since: dict[str, float], patience: float) -> None:
    for name in drivers:
        member = agent.directory.by_name(name)
        if member is not None and not agent.is_dead(member):
            gone_since.pop(name, None)
            continue
        agent.peers.look_for_news(name)
        if time.monotonic() - gone_since.setdefault(name, time.monotonic()) > patience:
            raise WorkerDied(
                f"worker {name!r}, the driver of a durable run, died and was not started again within {patience:g} s. "
                "What is kept of the run here is given up",
                worker=name,
            )


def _somebody_shuts_down(agent: Agent) -> bool:
    """Whether another worker waits in a graceful shutdown: then the runs that this one was started for are over."""
    living = [m for m in agent.peers.everyone() if not agent.is_dead(m)]
    missing = _missing_at_shutdown(agent, min(living, key=lambda m: m.worker_id))
    arrived = [] if missing is None else [m for m in living if m.name not in missing]
    # One that is not missing may also be dead, and this worker the last to hear of it; or it was just started, and the
    # one who coordinates, which may be joining itself, has not heard of it. So each has to say itself that it is there.
    return any(_waits_at_shutdown(agent, m) for m in arrived if m.name != agent.info.name)


def _waits_at_shutdown(agent: Agent, member: Member) -> bool:
    missing = _missing_at_shutdown(agent, member)
    return missing is not None and member.name not in missing


def _missing_at_shutdown(agent: Agent, member: Member) -> Collection[str] | None:
    """Whom a worker misses at the shutdown's barrier: others as far as it coordinates that, itself in any case. None if
    it does not answer."""
    if member.incarnation == agent.member.incarnation:
        return agent.layer(Barriers).missing(_BARRIER)
    try:
        reply = agent.ask(member, Barrier(_BARRIER, "", 0), timeout=_ASK_SECONDS, what=lambda: "who shuts down")
    except TelegradError:
        return None
    assert type(reply) is BarrierReply
    return reply.missing
