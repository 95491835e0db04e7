"""How a worker enters a job and how it leaves: who it is, what it tells the others, and whom it waits for."""

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from telegrad.errors import RendezvousError, TelegradError
from telegrad.ids import MAX_GENERATION, WorkerId, draw_incarnation, generation_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import set_current_agent
from telegrad.rpc.devices import as_published
from telegrad.rpc.job import store as store_host
from telegrad.rpc.job.barrier import Barriers
from telegrad.rpc.job.debug_waits import Waits
from telegrad.rpc.job.member_log import MemberLog, open_store, wait_for_ranks
from telegrad.rpc.job.store_recovery import StoreRecovery
from telegrad.rpc.layer import Layer
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.server.run_call import CallService
from telegrad.rpc.trust.job import JobTrust, tls_for, trust_for
from telegrad.rpc.workers import Member, check_id
from telegrad.transport.addresses import Listeners, host_identity

log = logging.getLogger("telegrad.rpc")

_LOOPBACK = "127.0.0.1"
# For workers whose rendezvous store has just ended: they come to the new one, and say which ids are taken.
_GRACE_SECONDS = 0.5

# The packages above, each with an `install(agent)` that puts its layer on an agent. By name: this one imports none.
_LAYERS = ("telegrad.rref", "telegrad.engine", "telegrad.observe")


class NameClash(RendezvousError):
    """Two workers of one name."""


class _Outdated(RendezvousError):
    """Others know of a worker with this id that was started before, and this one had thought itself the first."""


def start(name: str, rank: int, world_size: int | None, options: RpcBackendOptions, store: Any) -> Agent:
    """Start an agent as the worker `name` and make it the current one; it meets the others in `store`."""
    deadline = time.monotonic() + options.rendezvous_timeout
    given = store is not None
    trust = _trust(options, store)
    while True:
        if store is None:
            left = max(0.0, deadline - time.monotonic())
            store = open_store(options.init_method, rank, world_size, left)
        try:
            place = MemberLog(store, "static" if world_size else "open", trust.seal)
            if world_size is None and place.where is not None and place.is_first:
                time.sleep(_GRACE_SECONDS)
            store = None  # the place has it, and may let it go
            return _start_until_counted(place, name, rank, world_size, options, trust)
        except TelegradError:
            raise
        except RuntimeError as error:  # torch's own: the store has ended
            if given or store_host.place_in(options.init_method) is None or time.monotonic() >= deadline:
                raise RendezvousError(f"the rendezvous store {options.init_method!r} failed: {error}") from error
            log.info("the rendezvous store %r closed as worker %r came; it comes again", options.init_method, name)
            store = None


def _trust(options: RpcBackendOptions, store: Any) -> JobTrust:
    where = store_host.place_in(options.init_method) if store is None else store_host.address_of(store)
    if where is None:
        return trust_for(options, None, True)
    return trust_for(options, where[0], store_host.is_here(where[0]))


def _start_until_counted(
    place: MemberLog, name: str, rank: int, world_size: int | None, options: RpcBackendOptions, trust: JobTrust
) -> Agent:
    while True:
        try:
            return _start_at(place, name, rank, world_size, options, trust)
        except _Outdated:
            log.info("worker %r joins once more: it had opened the rendezvous store anew", name)
            place.read_again()
        except BaseException:
            place.lose()  # now, and not when the error is forgotten
            raise


def _start_at(
    place: MemberLog, name: str, rank: int, world_size: int | None, options: RpcBackendOptions, trust: JobTrust
) -> Agent:
    worker_id = rank if rank >= 0 else place.next_id()
    check_id(worker_id)
    incarnation = draw_incarnation(_generation(place, worker_id))
    host = options.host or _LOOPBACK
    tls = tls_for(options, host)
    listeners = Listeners(options.transports, host)
    member = Member(
        name,
        WorkerId(worker_id),
        incarnation,
        tuple(listeners.addresses),
        os.getpid(),
        device_maps=as_published(options),
        host=host_identity(),
        secret=trust.published,
        certificate=b"" if tls is None else tls.fingerprint,
    )
    agent = Agent(member, trust.secret.value, options, listeners, place, tls)
    agent.world_size = world_size
    agent.store_recovery = StoreRecovery(agent, place)
    install_own_layers(agent)
    try:
        agent.start()
        agent.store_recovery.start()
        for layer in _LAYERS:
            importlib.import_module(layer).install(agent)
        set_current_agent(agent)  # before the others know of this worker: their first call may use it
        _meet(agent, place, member, world_size)
        agent.liveness.start()
    except BaseException as error:
        set_current_agent(None)
        # The other side of a clash must find this record to see it, too.
        leave(agent, quietly=isinstance(error, NameClash))
        agent.close(farewell=False)
        raise
    return agent


def install_own_layers(agent: Agent) -> None:
    """What every agent serves, whatever is put on it above: users' calls, barriers, questions about who waits."""
    for layer in (CallService(agent.info.name, agent.layers), Barriers(agent), Waits(agent), Membership(agent)):
        agent.install(layer)


class Membership(Layer):
    """Which records of members this worker believes, whichever thread reads them: not all as it joins or leaves."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._joining: _Joining | None = None
        self._leaving = False

    def on_news(self, members: Sequence[Member]) -> Sequence[Member]:
        """A call that is served while this worker joins may look for its own callee, and read the news first."""
        if self._joining is not None:
            return self._joining.take(members)
        if self._leaving:
            return [member for member in members if not member.leaving]
        return members

    @contextlib.contextmanager
    def joining(self, member: Member, world_size: int | None) -> Iterator["_Joining"]:
        """Look for clashes with this worker's own record, which is being published."""
        self._joining = _Joining(self._agent, member, world_size)
        try:
            yield self._joining
        finally:
            self._joining = None

    @contextlib.contextmanager
    def leaving_together(self) -> Iterator[None]:
        """All leave: those who are quicker have said so before the last barrier, and still take part in it."""
        self._leaving = True
        try:
            yield
        finally:
            self._leaving = False


class _Joining:
    """What a worker that joins has seen of the others."""

    def __init__(self, agent: Agent, member: Member, world_size: int | None) -> None:
        self._agent = agent
        self._member = member
        self._world_size = world_size
        # Who has been here this time, though it may have left again already: it is not waited for.
        self._came: set[int] = set()
        self._clash: RendezvousError | None = None

    def take(self, members: Sequence[Member]) -> Sequence[Member]:
        """Records were read: those of others. A clash is raised by `present`, in the thread that joins."""
        mine = self._member
        try:
            _check_clash(self._agent, members, mine, self._world_size)
        except RendezvousError as clash:
            self._clash = clash
        generation = generation_of(mine.incarnation)
        self._came.update(m.worker_id for m in members if generation_of(m.incarnation) >= generation)
        return [m for m in members if m.worker_id != mine.worker_id]

    def present(self) -> set[int]:
        """The ids of those who are here, or have been this time."""
        if self._clash is not None:
            raise self._clash
        return self._came | {int(m.worker_id) for m in self._agent.directory.members()}


def _generation(place: MemberLog, worker_id: int) -> int:
    generation = place.next_generation(worker_id)
    if generation > MAX_GENERATION:
        raise RendezvousError(
            f"worker id {worker_id} was started {generation} times in this job: start it under another id"
        )
    return generation


def _meet(agent: Agent, place: MemberLog, member: Member, world_size: int | None) -> None:
    take = agent.peers.take_news
    with agent.layer(Membership).joining(member, world_size) as joining:
        _publish(place, member)  # before looking for clashes, so that both sides of one see it
        place.news(take)
        joining.present()
        if world_size is not None:
            wait_for_ranks(place, take, joining.present, world_size, agent.options.rendezvous_timeout)
            if place.is_first and place.is_outdated(member.worker_id, member.incarnation):
                raise _Outdated(f"worker {member.name!r} is not the first with its id")


def _publish(place: MemberLog, member: Member) -> None:
    try:
        place.publish(member)
    except RuntimeError as error:
        if place.where is None:
            raise
        log.debug(
            "the rendezvous store has just closed: its other workers say who is here when it is open again: %s", error
        )


def _check_clash(agent: Agent, members: Sequence[Member], mine: Member, world_size: int | None) -> None:
    """Two living workers of one name are a mistake. The same rank again is a restart, so is the name of a dead one."""
    present = {m.worker_id: m for m in agent.directory.members()}
    for member in members:
        if not member.leaving:
            present[member.worker_id] = member
        elif member.worker_id in present and present[member.worker_id].incarnation == member.incarnation:
            del present[member.worker_id]
    present[mine.worker_id] = mine
    names: dict[str, Member] = {}
    for member in present.values():
        other = names.setdefault(member.name, member)
        if other is not member and (world_size is not None or _answers(agent, other if member is mine else member)):
            raise NameClash(
                f"RPC worker name {member.name!r} is not unique: workers {other.worker_id} and {member.worker_id} both "
                "use it. Give each worker a name of its own"
            )


def _answers(agent: Agent, member: Member) -> bool:
    try:
        agent.link(member).connection()
    except (TelegradError, OSError):
        return False
    return True


def leave(agent: Agent, quietly: bool = False) -> None:
    """Record that this worker is gone, unless `quietly`; what becomes of the rendezvous store is up to others."""
    if agent.place is not None and not quietly:
        try:
            agent.place.publish(msgspec.structs.replace(agent.member, leaving=True, secret=b""))
        except RuntimeError as error:
            log.debug("the rendezvous store is gone: %s", error)
    if agent.store_recovery is not None:
        agent.store_recovery.close()


def let_go_of_place(agent: Agent) -> None:
    """Let the store go. If it is in this process, that ends it for all."""
    place, agent.place = agent.place, None
    if place is not None:
        place.lose()
