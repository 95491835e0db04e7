"""Barriers between all living workers: one of them coordinates (see `arrivals.py`), the others ask it."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from telegrad.errors import ProtocolError, TelegradError, TooManyCalls, WorkerDied
from telegrad.ids import WorkerId
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.arrivals import Arrival, Arrivals, is_as_far
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.request import Request
from telegrad.rpc.threads.interrupts import pause
from telegrad.rpc.threads.wakeup import Wakeup
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member
from telegrad.wire.messages import AnyMessage, Barrier, BarrierReply

_ASK_SECONDS = 1.0
_AGAIN_SECONDS = 0.5  # before a coordinator is asked again that takes no more calls at the moment
# Between looks, while waiting, whether another worker should coordinate by now: at first, and at most.
_NEWS_SECONDS, _MOST_NEWS_SECONDS = 0.5, 8.0


class Barriers(Layer):
    """The barriers that this worker coordinates, and those at which it waits itself, whoever coordinates them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._arrivals = Arrivals()
        self._waits_at: list[str] = []  # by the keys; one for each thread that waits
        self._lock = threading.Lock()  # guards both

    def messages(self) -> Mapping[type[Any], Served]:
        """Arrivals at a barrier, and the question who is missing at one. A shutdown does not wait for its own."""
        return {Barrier: Served(self._serve, counts_as_work=False)}

    def missing(self, key: str) -> list[str]:
        """Who has not reached a barrier, as far as is known here: if another worker coordinates it, of this one."""
        with self._lock:
            is_here = any(is_as_far(reached, key) for reached in self._waits_at)
            missing = self._arrivals.missing(key, self._living())
        return [name for name in missing if not (is_here and name == self._agent.info.name)]

    @contextlib.contextmanager
    def waiting_at(self, key: str) -> Iterator[None]:
        """This worker is at a barrier for the length of a block."""
        with self._lock:
            self._waits_at.append(key)
        try:
            yield
        finally:
            with self._lock:
                self._waits_at.remove(key)

    def _living(self) -> list[str]:
        agent = self._agent
        return [m.name for m in agent.directory.members() if not agent.is_dead(m)]

    def _serve(self, request: Request) -> None:
        message, agent = request.message, self._agent
        assert type(message) is Barrier
        if agent.directory.look_up is not None:
            with blocking():
                agent.peers.everyone()  # whom to wait for
        if not message.worker:  # no arrival, but the question who is missing
            agent.reply(request, BarrierReply(0, tuple(self.missing(message.key))))
            return
        if message.worker != request.caller.name:
            raise ProtocolError(f"worker {request.caller.name!r} cannot reach a barrier for {message.worker!r}")
        caller = request.caller

        def answer(total: int) -> None:
            agent.reply(request, BarrierReply(total, ()))

        with self._lock:
            if agent.is_dead(caller):  # which was noticed while this was on its way: its successor may have come
                return
            self._arrivals.arrive(message.key, caller.name, Arrival(caller.incarnation, message.activity, answer))
        self._answer_complete()

    def _lose(self, member: Member) -> None:
        with self._lock:
            self._arrivals.lose(member.name, member.incarnation)

    def _answer_complete(self) -> None:
        with self._lock:
            ready = self._arrivals.complete(self._living(), self._agent.info.name)
        for answer, total in ready:
            answer(total)

    def on_death(self, member: Member) -> None:
        """The dead are not waited for, and have not come for those who are started again in their place."""
        self._lose(member)
        self._agent.io_threads.submit(self._answer_complete)

    def _missing_anywhere(self) -> list[tuple[str, str]]:
        with self._lock:
            keys = self._arrivals.waiting()
        return [(key, name) for key in keys for name in self.missing(key)]

    def waits(self) -> list[tuple[str, int]]:
        """Whom the barriers that are coordinated here wait for."""
        ids = {m.name: int(m.worker_id) for m in self._agent.directory.members()}
        return [
            (f"barrier {key!r}, which it coordinates, waits for {name}", ids.get(name, -1))
            for key, name in self._missing_anywhere()
        ]

    def awaited(self) -> list[Member]:
        """Those missing at a barrier, of whom nothing was asked."""
        names = {name for _, name in self._missing_anywhere()}
        return [m for m in self._agent.directory.members() if m.name in names] if names else []


def barrier(agent: Agent, key: str, activity: int, deadline: float) -> int:
    """Wait until every living worker has reached the barrier `key`; the sum of their activities."""
    with agent.layer(Barriers).waiting_at(key):
        return _wait_at(agent, key, activity, deadline)


def _wait_at(agent: Agent, key: str, activity: int, deadline: float) -> int:
    while True:
        _look_for_coordinator(agent)
        coordinator = _coordinator(agent)
        try:
            reply = _arrive(agent, coordinator, Barrier(key, agent.info.name, activity), deadline)
        except WorkerDied:
            agent.lost(coordinator, f"worker {coordinator.name!r} ended while others waited at a barrier")
            continue  # the next worker coordinates
        except TooManyCalls:  # of this worker's calls just before
            if time.monotonic() + _AGAIN_SECONDS >= deadline:
                raise
            pause(_AGAIN_SECONDS)
            continue
        if reply is not None:
            assert type(reply) is BarrierReply
            return reply.activity


def _coordinator(agent: Agent) -> Member:
    """Who coordinates, by all that is known here. Whoever knows less learns of it while it waits."""
    return min(_candidates(agent), key=lambda m: m.worker_id)


def _candidates(agent: Agent) -> list[Member]:
    """The living; where not all are known here, the first of them."""
    if agent.directory.look_up is None:
        return [m for m in agent.directory.members() if not agent.is_dead(m)]
    ranks = map(agent.directory.by_id, range(agent.world_size or 0))
    return [next(m for m in ranks if m is not None and not agent.is_dead(m))]


def _look_for_coordinator(agent: Agent) -> None:
    """Who was started again may be the coordinator."""
    if agent.directory.look_up is None:
        agent.peers.look_for_news()
        return
    for rank in range(agent.member.worker_id):
        if agent.standing(WorkerId(rank)) is None:  # else its end would have shown
            agent.peers.look_for_news(rank)
        member = agent.directory.by_id(rank)
        if member is not None and not agent.is_dead(member):
            return
    agent.peers.look_for_news()  # it is this worker, which has to know of all


def _arrive(agent: Agent, coordinator: Member, message: Barrier, deadline: float) -> AnyMessage | None:
    """Reach a barrier and wait there; None if another coordinator has to be asked, which came back meanwhile."""
    left = 0.0 if deadline == float("inf") else max(deadline - time.monotonic(), 1e-3)
    wakeup = Wakeup()
    slot = agent.send(
        coordinator,
        message,
        timeout=left,
        what=lambda: f"reaching the barrier {message.key!r}",
        complete=lambda _: wakeup.set(),
    )
    seconds = _NEWS_SECONDS
    while not slot.done:
        with blocking():
            wakeup.wait(seconds)
        seconds = min(2 * seconds, _MOST_NEWS_SECONDS)  # all who wait look, in one store
        if not slot.done:
            _look_for_coordinator(agent)
            if (
                _coordinator(agent).incarnation != coordinator.incarnation
                and slot.link.pending.give_up(slot.request_id) is not None
            ):
                return None
    return agent.reply_frame(slot).message


def ask_who_is_missing(agent: Agent, key: str) -> str:
    """Who has not reached a barrier, in words."""
    coordinator = _coordinator(agent)
    try:
        reply = agent.ask(
            coordinator, Barrier(key, "", 0), timeout=_ASK_SECONDS, what=lambda: f"who is missing at {key!r}"
        )
    except TelegradError:
        return f"perhaps {coordinator.name}, which does not answer"
    assert type(reply) is BarrierReply
    return ", ".join(reply.missing)
