"""How a worker enters a job and how it leaves: who it is, what it tells the others, and whom it waits for."""

import importlib
import logging
import os
import time
from typing import Any

import msgspec

from telegrad.cuda.gpus import visible_gpus
from telegrad.errors import AuthenticationError, RendezvousError, TelegradError
from telegrad.ids import MAX_GENERATION, WorkerId, draw_incarnation
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import set_current_agent
from telegrad.rpc.devices import as_published, check_maps
from telegrad.rpc.job.attendance import Attendance, check_counted, counterpart_of
from telegrad.rpc.job.barrier import Barriers
from telegrad.rpc.job.debug_waits import Waits
from telegrad.rpc.job.membership import Clash, Joining, Membership
from telegrad.rpc.job.presence import LOOPBACK, address_towards, seems_alive
from telegrad.rpc.job.reach import DialsBack, check_reach, check_reach_of
from telegrad.rpc.job.rendezvous import store as store_host
from telegrad.rpc.job.rendezvous.job_marker import own_marker
from telegrad.rpc.job.rendezvous.member_log import MemberLog, open_store
from telegrad.rpc.job.rendezvous.store_recovery import StoreRecovery
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.server.run_call import CallService
from telegrad.rpc.trust.guard import install_guard
from telegrad.rpc.trust.job import JobTrust, tls_for, trust_for
from telegrad.rpc.trust.secret import Source
from telegrad.rpc.workers import Member, check_id
from telegrad.transport.addresses import Listeners, host_identity

log = logging.getLogger("telegrad.rpc")

_DYING_SECONDS = 5.0  # for a worker whose successor has been started already
_LOOK_SECONDS = 0.1
# For workers whose rendezvous store has just ended: they come to the new one, and say which ids are taken.
_GRACE_SECONDS = 0.5

# The packages above, each with an `install(agent)` that puts its layer on an agent. By name: this one imports none.
_LAYERS = ("telegrad.rref", "telegrad.engine", "telegrad.observe")


class _Outdated(RendezvousError):
    """Others know of a worker with this id that was started before, and this one had thought itself the first."""


def start(name: str, rank: int, world_size: int | None, options: RpcBackendOptions, store: Any, job: str = "") -> Agent:
    """Start an agent as the worker `name` and make it the current one; it meets the others in `store`.

    `job` is what the engine that started it calls the job."""
    deadline = time.monotonic() + options.rendezvous_timeout
    given = store is not None
    trust = _trust(options, store)
    while True:
        if store is None:
            left = max(0.0, deadline - time.monotonic())
            store = open_store(options.init_method, rank, world_size, left)
        try:
            member_log = MemberLog(store, own_marker(name, world_size, job), trust.seal)
            if world_size is None and member_log.where is not None and member_log.is_first:
                time.sleep(_GRACE_SECONDS)
            store = None  # the log has it, and may let it go
            return _start_until_counted(member_log, name, rank, world_size, options, trust)
        except TelegradError:
            raise
        except RuntimeError as error:  # torch's own: the store has ended
            if given or store_host.endpoint_in(options.init_method) is None or time.monotonic() >= deadline:
                raise RendezvousError(f"the rendezvous store {options.init_method!r} failed: {error}") from error
            log.info("the rendezvous store %r closed while worker %r joined; it tries again", options.init_method, name)
            store = None


def _trust(options: RpcBackendOptions, store: Any) -> JobTrust:
    where = store_host.endpoint_in(options.init_method) if store is None else store_host.endpoint_of(store)
    if where is None:
        return trust_for(options, None, True)
    try:
        return trust_for(options, where[0], store_host.is_here(where[0]))
    except AuthenticationError:
        problem = store_host.why_unknown(where[0])
        if not problem:
            raise
        raise RendezvousError(
            f"cannot meet at {options.init_method!r}: the name {where[0]!r} does not resolve on this machine "
            f"({problem}). Is it spelled right? A name that is still to be announced is waited for in a job that has a "
            "secret, which one on several hosts needs"
        ) from None


def _start_until_counted(
    member_log: MemberLog, name: str, rank: int, world_size: int | None, options: RpcBackendOptions, trust: JobTrust
) -> Agent:
    while True:
        try:
            return _start_at(member_log, name, rank, world_size, options, trust)
        except _Outdated:
            log.info("worker %r joins once more: it had opened the rendezvous store anew", name)
            member_log.read_again()
        except BaseException:
            member_log.lose()  # now, and not when the error is forgotten
            raise


def _start_at(
    member_log: MemberLog, name: str, rank: int, world_size: int | None, options: RpcBackendOptions, trust: JobTrust
) -> Agent:
    worker_id = rank if rank >= 0 else member_log.next_id()
    check_id(worker_id)
    incarnation = draw_incarnation(_generation(member_log, worker_id))
    host = _listening_host(options, member_log, trust)
    tls = tls_for(options, host)
    listeners = Listeners(options.transports, host)
    member = Member(
        name,
        WorkerId(worker_id),
        incarnation,
        tuple(listeners.addresses),
        os.getpid(),
        device_maps=as_published(options),
        gpus=visible_gpus(),
        devices=tuple([str(device) for device in options.devices]),
        host=host_identity(),
        secret=trust.published,
        certificate=b"" if tls is None else tls.fingerprint,
    )
    agent = Agent(member, trust.secret.value, options, listeners, member_log, tls)
    install_guard(agent)
    agent.world_size = world_size
    if member_log.register is not None:
        agent.directory.look_up = member_log.look_up
    agent.store_recovery = StoreRecovery(agent, member_log)
    install_own_layers(agent)
    try:
        agent.start()
        agent.store_recovery.start()
        for layer in _LAYERS:
            importlib.import_module(layer).install(agent)
        set_current_agent(agent)  # before the others know of this worker: their first call may use it
        _meet(agent, member_log, member, world_size)
        agent.start_heartbeat()
    except BaseException as error:
        set_current_agent(None)
        # The other side of a clash must find this record to see it, too.
        leave(agent, quietly=isinstance(error, Clash))
        agent.close(farewell=False)
        if isinstance(error, Clash):
            raise RendezvousError(str(error)) from None  # the difference is nobody's concern but ours
        raise
    return agent


def _listening_host(options: RpcBackendOptions, member_log: MemberLog, trust: JobTrust) -> str:
    """Where to listen by TCP: as the options say, else on the network over which the store was reached. A job
    that shares the user's own secret is on one host."""
    if options.host:
        return options.host
    if member_log.address is None or trust.secret.source is Source.USER:
        return LOOPBACK
    try:
        return address_towards(*member_log.address)
    except OSError:
        return LOOPBACK


def install_own_layers(agent: Agent) -> None:
    """What every agent serves, whatever is put on it above: users' calls, barriers, questions about who waits."""
    calls = CallService(agent.info.name, agent.layers)
    for layer in (calls, Barriers(agent), Waits(agent), Membership(agent), DialsBack(agent)):
        agent.install(layer)


def _generation(member_log: MemberLog, worker_id: int) -> int:
    generation = member_log.next_generation(worker_id)
    if generation > MAX_GENERATION:
        raise RendezvousError(
            f"worker id {worker_id} was started {generation} times in this job: start it under another id"
        )
    return generation


def _meet(agent: Agent, member_log: MemberLog, member: Member, world_size: int | None) -> None:
    take = agent.peers.take_news
    with agent.layer(Membership).joining(member, world_size) as joining:
        member_log.news(take, about=member.worker_id)
        _await_end_of(joining, member_log, agent)  # before the others read that this worker has replaced it
        attendance = None if world_size is None else Attendance(agent, member_log, joining, world_size)
        _publish(member_log, member, attendance)  # before looking for clashes, so that both sides of one see it
        if attendance is None:
            counted = False
            member_log.news(take)
            joining.present()
        else:
            counted = attendance.wait()
            # Whoever says in a large job's new store what it knows may not know of this worker, but another does.
            may_be = member_log.is_first or (member_log.register is not None and not counted)
            if may_be and member_log.is_outdated(member.worker_id, member.incarnation):
                raise _Outdated(f"worker {member.name!r} is not the first with its id")
            if counted:
                check_counted(agent, member_log, joining)
    member_log.has_met = world_size is not None
    if counted:
        check_reach_of(agent, counterpart_of(agent, member_log))
    else:
        check_reach(agent)
        check_maps(joining.seen.values(), is_static=world_size is not None)


def _await_end_of(joining: Joining, member_log: MemberLog, agent: Agent) -> None:
    """A worker that is started again replaces one that is dead or dying. A living one is another job's."""
    deadline = time.monotonic() + min(_DYING_SECONDS, agent.options.rendezvous_timeout)
    while (other := joining.predecessor) is not None and other.pid != os.getpid() and seems_alive(other):
        if time.monotonic() >= deadline:
            raise Clash(
                f"rank {other.worker_id} of this job is taken: worker {other.name!r} (process {other.pid}) runs. "
                "Two jobs at one address? Give this one another port or file, or end the other first"
            )
        time.sleep(_LOOK_SECONDS)
        member_log.news(agent.peers.take_news, about=agent.member.worker_id)


def _publish(member_log: MemberLog, member: Member, attendance: Attendance | None) -> None:
    try:
        has_own_name = member_log.publish(member)
        if attendance is not None:
            attendance.arrive(has_own_name)
    except RuntimeError as error:
        if member_log.where is None:
            raise
        log.debug(
            "the rendezvous store has just closed: its other workers say who is here when it is open again: %s", error
        )


def leave(agent: Agent, quietly: bool = False, ending: str = "") -> None:
    """Record that this worker is gone, unless `quietly`; what becomes of the rendezvous store is up to others."""
    if agent.member_log is not None and not quietly:
        try:
            agent.member_log.publish(_last_record(agent, ending))
        except RuntimeError as error:
            log.debug("the rendezvous store is gone: %s", error)
    if agent.store_recovery is not None:
        agent.store_recovery.close()


def _last_record(agent: Agent, ending: str) -> Member:
    return msgspec.structs.replace(agent.member, leaving=True, ending=ending, secret=b"")


def end_job(agent: Agent) -> None:
    """All workers have left: the next job that meets here may be another."""
    if agent.member_log is not None:
        try:
            agent.member_log.end_job()
        except RuntimeError as error:
            log.debug("the rendezvous store is gone: %s", error)


def let_go_of_store(agent: Agent, ending: str = "") -> None:
    """Let the store go. If it is in this process, that ends it for all."""
    member_log, agent.member_log = agent.member_log, None
    if member_log is not None:
        member_log.say_last(_last_record(agent, ending))
        member_log.lose()
