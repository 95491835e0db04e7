"""Barriers between all living workers: one of them keeps the book (see `arrivals.py`), the others ask it.

And the other requests that every agent serves, whatever layers are put on it.
"""

import threading
import time

from telegrad.errors import TelegradError, WorkerDied
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.arrivals import Arrivals
from telegrad.rpc.job.debug_waits import install as install_waits
from telegrad.rpc.server.request import Request
from telegrad.rpc.server.run_call import serve_call
from telegrad.rpc.workers import Member
from telegrad.wire.messages import Barrier, BarrierReply, PythonCall

_ASK_SECONDS = 1.0


def register_handlers(agent: Agent) -> None:
    """Let an agent serve calls, barriers and questions about who waits for whom."""
    book = Arrivals()
    book_lock = threading.Lock()
    agent.handlers[PythonCall] = lambda request: serve_call(agent, request)

    def settle() -> None:
        with book_lock:
            living = [m.name for m in agent.directory.members() if not agent.is_dead(m)]
            ready = book.complete(living, agent.info.name)
        for answer, total in ready:
            answer(total)

    def serve_barrier(request: Request) -> None:
        message = request.message
        assert type(message) is Barrier
        if not message.worker:  # no arrival, but the question who is missing
            agent.reply(request, BarrierReply(0, tuple(agent.missing_at(message.key))))
            return
        with book_lock:
            book.arrive(
                message.key,
                message.worker,
                message.activity,
                lambda total: agent.reply(request, BarrierReply(total, ())),
            )
        settle()

    def forget_dead(_: Member) -> None:
        agent.io_threads.submit(settle)

    def waits() -> list[tuple[str, int]]:
        ids = {m.name: int(m.worker_id) for m in agent.directory.members()}
        with book_lock:
            keys = book.waiting()
        return [
            (f"barrier {key!r}, which it keeps, waits for {name}", ids.get(name, -1))
            for key in keys
            for name in agent.missing_at(key)
        ]

    def missing() -> list[Member]:
        with book_lock:
            keys = book.waiting()
        names = {name for key in keys for name in agent.missing_at(key)}
        return [m for m in agent.directory.members() if m.name in names]

    agent.liveness.expected.append(missing)
    agent.wait_sources.append(waits)
    install_waits(agent)
    agent.handlers[Barrier] = serve_barrier
    agent.on_death.append(forget_dead)
    agent.missing_at = lambda key: book.missing(
        key, (m.name for m in agent.directory.members() if not agent.is_dead(m))
    )


def barrier(agent: Agent, key: str, activity: int, deadline: float) -> int:
    """Wait until every living worker has reached the barrier `key`; the sum of their activities."""
    while True:
        living = [m for m in agent.directory.members() if not agent.is_dead(m)]
        host = min(living, key=lambda m: m.worker_id)
        left = 0.0 if deadline == float("inf") else max(deadline - time.monotonic(), 1e-3)
        try:
            reply = agent.ask_patiently(
                host,
                Barrier(key, agent.info.name, activity),
                timeout=left,
                what=lambda: f"reaching the barrier {key!r}",
            )
        except WorkerDied:
            agent.lost(host, f"worker {host.name!r} ended while others waited at a barrier")
            continue  # the next worker keeps the book
        assert type(reply) is BarrierReply
        return reply.activity


def missing_at(agent: Agent, key: str) -> str:
    """Who has not reached a barrier, in words."""
    host = min((m for m in agent.directory.members() if not agent.is_dead(m)), key=lambda m: m.worker_id)
    try:
        reply = agent.ask(host, Barrier(key, "", 0), timeout=_ASK_SECONDS, what=lambda: f"who is missing at {key!r}")
    except TelegradError:
        return f"perhaps {host.name}, which does not answer"
    assert type(reply) is BarrierReply
    return ", ".join(reply.missing)
