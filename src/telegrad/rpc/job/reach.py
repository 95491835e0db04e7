"""Whether workers on different hosts can reach each other, found out while they join: the error names the address.

A worker asks one on another host to dial it back at the address it published. On one host nothing is asked.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from telegrad.errors import RendezvousError, TelegradError, WorkerDied
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.request import Request
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import TCP
from telegrad.wire.messages import Ack, DialBack

_MOST_ASKED = 3  # in an open job, where some of those on record may be gone


class DialsBack(Layer):
    """Dials those who ask for it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def messages(self) -> Mapping[type[Any], Served]:
        """The request of a worker that joins."""
        return {DialBack: Served(self._serve, counts_as_work=False)}

    def _serve(self, request: Request) -> None:
        agent = self._agent
        with blocking():
            agent.peers.look_for_news(request.caller.worker_id)
            member = agent.directory.by_id(request.caller.worker_id)
            if member is None or member.incarnation != request.caller.incarnation:
                raise RendezvousError(f"worker {request.caller.name!r} is not on record where the workers meet")
            agent.link(member).connection(time.monotonic() + agent.options.connect_timeout)
        agent.reply(request, Ack())


def partner_of(me: Member, members: Sequence[Member]) -> Member | None:
    """Whom to ask: the one that has the same number among those of the next host. So each is asked about once."""
    hosts: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda m: m.worker_id):
        hosts.setdefault(member.host, []).append(member)
    if len(hosts) < 2 or me.host not in hosts:
        return None
    names = list(hosts)
    next_host = hosts[names[(names.index(me.host) + 1) % len(names)]]
    return next_host[hosts[me.host].index(me) % len(next_host)]


def check_reach_of(agent: Agent, partner: Member | None) -> None:
    """See that this worker reaches one on another host, if there is one, and is reached by it. RendezvousError says
    what fails."""
    if partner is not None:
        _connect(agent, partner)
        _ask(agent, partner)


def check_reach(agent: Agent) -> None:
    """The same where the records of all are known."""
    members = agent.directory.members()
    if agent.world_size is not None:
        check_reach_of(agent, partner_of(agent.member, members))
        return
    others = [m for m in members if m.host != agent.member.host and not agent.is_dead(m)]
    for other in others[-_MOST_ASKED:]:
        try:
            _connect(agent, other)
        except RendezvousError:
            continue
        _ask(agent, other)
        return


def _connect(agent: Agent, member: Member) -> None:
    try:
        agent.link(member).connection(time.monotonic() + agent.options.connect_timeout)
    except (TelegradError, OSError) as error:
        raise RendezvousError(
            f"worker {agent.info.name!r} cannot reach worker {member.name!r} at {_published(member)}, the address it "
            f"published ({error}). {_ADVICE}"
        ) from error


def _ask(agent: Agent, member: Member) -> None:
    seconds = agent.options.connect_timeout + agent.runtime.patience
    try:
        agent.ask(member, DialBack(), timeout=seconds, what=lambda: f"asking {member.name!r} to dial back")
    except WorkerDied as error:
        if error.worker == member.name:
            return  # it has ended meanwhile, which is another matter
        raise _not_reached(agent, member, error) from error
    except TelegradError as error:
        raise _not_reached(agent, member, error) from error


def _not_reached(agent: Agent, member: Member, error: Exception) -> RendezvousError:
    return RendezvousError(
        f"worker {member.name!r} on another host cannot reach worker {agent.info.name!r} at "
        f"{_published(agent.member)}, the address it published ({error}). {_ADVICE}"
    )


def _published(member: Member) -> str:
    return ", ".join(f"{a.host}:{a.where}" for a in member.addresses if a.kind == TCP) or "no TCP address"


_ADVICE = (
    "Set TELEGRAD_HOST (or the option `host`) on each host to an address that the others reach; without a secret "
    "(TELEGRAD_SECRET) workers listen on loopback only"
)
