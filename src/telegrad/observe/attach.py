"""Looking at a job from outside: an observer that is no worker, and that nobody waits for or calls.

It connects to one worker that it knows of, proves that it has the job's secret, and asks who the others are. It has no
name in the rendezvous store, listens nowhere and has no references: when it goes, nothing has to be settled.

    with attached() as agent:                      the job that runs on this host
    with attached("4711") as agent:                that of a process
    with attached("tcp://host:29500") as agent:    that whose workers meet there, with the secret in TELEGRAD_SECRET
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from telegrad.errors import TelegradError
from telegrad.ids import MAX_WORKER_ID, WorkerId, draw_incarnation
from telegrad.observe.announcement import choose
from telegrad.observe.asking import ask
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.rendezvous import store as store_host
from telegrad.rpc.job.rendezvous.job_marker import OPEN, STATIC
from telegrad.rpc.job.rendezvous.member_log import NAMESPACE_KEY, read_records
from telegrad.rpc.job.rendezvous.store_client import NotAStore, Prefixed, StoreClient
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.trust.job import trust_for
from telegrad.rpc.trust.secret import user_secret
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import Listeners, host_identity

_CONNECT_SECONDS = 5.0
_decode = msgspec.msgpack.Decoder(list[Member]).decode


class _HearSay:
    """Stands where a worker has the log of members: what the workers say of each other."""

    store: Any = None
    reads_all, is_settling = True, False

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self._turn = threading.Lock()

    def news(self, take: Callable[[list[Member]], None], about: str | int | None = None) -> None:
        """Ask the first worker that answers who is there."""
        agent = self.agent
        if agent is None or not self._turn.acquire(blocking=False):  # asking may itself find that one is gone
            return
        try:
            for member in agent.directory.members():
                if not agent.is_dead(member):
                    with contextlib.suppress(TelegradError, OSError):
                        take(_decode(ask(agent, member, "members")))
                        return
        finally:
            self._turn.release()

    def publish(self, member: Member) -> bool:
        """An observer is not known to those who were not asked."""
        return True

    def end_job(self) -> None:
        """Nor does it end anything."""

    def say_last(self, member: Member) -> None:
        """No store ends with it."""

    def lose(self) -> None:
        """There is no store to let go."""


@contextlib.contextmanager
def attached(where: str | None = None) -> Iterator[Agent]:
    """An agent that observes a running job, for the length of a block: for `Board`, `ask_all` or `explanation.look`.

    `where` is None for the job that runs on this host, the id of one of its processes, or `tcp://host:port`, where its
    workers meet. TelegradError if there is none, or none of its workers answers."""
    members, secret = _found(where)
    agent = _observer(members, secret)
    try:
        agent.start()
        agent.start_heartbeat()
        agent.peers.learn(members)
        if not _answering(agent, members):
            names = ", ".join(repr(member.name) for member in members[:4])
            raise TelegradError(f"no worker of the job answers (asked {names}); is it ending, or behind a firewall?")
        yield agent
    finally:
        agent.close()


@contextlib.contextmanager
def only_errors_logged() -> Iterator[None]:
    """For the length of a block, Telegrad logs errors alone: an observer shows who is gone by itself."""
    logger = logging.getLogger("telegrad")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def has_ended(agent: Agent) -> bool:
    """Whether no worker of the job that an observer is attached to is there any more: asks until one answers."""
    agent.peers.look_for_news()
    return all(agent.is_dead(member) for member in agent.directory.members())


def _answering(agent: Agent, members: Sequence[Member]) -> bool:
    """Whether one of the workers answers; then all are known."""
    for member in members:
        with contextlib.suppress(TelegradError, OSError):
            agent.peers.learn(_decode(ask(agent, member, "members", seconds=_CONNECT_SECONDS)))
            return True
    return False


def _observer(members: Sequence[Member], secret: bytes) -> Agent:
    # Shared memory is of no use for answers of a few kB, and needs descriptors.
    options = RpcBackendOptions(secret=secret, shared_memory=False, connect_timeout=_CONNECT_SECONDS)
    published = next((member.secret for member in members if member.secret), b"")
    member = Member(
        f"observer-{os.getpid()}",
        WorkerId(MAX_WORKER_ID),  # no worker's: those are counted from 0
        draw_incarnation(0),
        (),
        os.getpid(),
        host=host_identity(),
        secret=published,  # of an insecure job: each worker's own is proven to it
    )
    known = _HearSay()
    agent = Agent(member, secret, options, Listeners((), ""), known)
    agent.directory.update([msgspec.structs.replace(member, leaving=True)])  # it is not one of those it looks at
    known.agent = agent
    return agent


def _found(where: str | None) -> tuple[list[Member], bytes]:
    """Workers of the job, and its secret."""
    if where is None or where.isdecimal():
        job = choose(int(where) if where else None)
        secret = job.workers[-1].secret
        return [said.member for said in reversed(job.workers)], user_secret() if secret is None else secret
    endpoint = store_host.endpoint_in(where)
    if endpoint is None:
        raise TelegradError(f"{where!r} is neither the id of a process nor tcp://HOST:PORT, where the workers meet")
    trust = trust_for(RpcBackendOptions(), endpoint[0], store_host.is_here(endpoint[0]))
    try:
        store = StoreClient(*endpoint, connect_seconds=_CONNECT_SECONDS, timeout=_CONNECT_SECONDS)
        ours = Prefixed("telegrad", store)
        namespace = ours.get(NAMESPACE_KEY).decode() if ours.check(NAMESPACE_KEY) else "telegrad"
        records = [
            m for kind in (STATIC, OPEN) for m in read_records(Prefixed(f"{namespace}/{kind}", store), trust.seal)
        ]
    except (NotAStore, OSError, RuntimeError) as error:
        raise TelegradError(f"nobody answers at {where} as the store of a job would: {error}") from error
    gone = {member.incarnation for member in records if member.leaving}
    latest = {m.worker_id: m for m in records if m.incarnation not in gone}
    if not latest:
        raise TelegradError(
            f"the store at {where} has no records of workers that this secret opens; is TELEGRAD_SECRET the job's?"
        )
    return list(latest.values()), trust.secret.value
