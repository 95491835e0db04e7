"""The beginning and the end of an agent: `init_rpc` and `shutdown`.

A graceful shutdown ends when all workers have reached it and nothing is under way anywhere: all meet at a barrier with
a count of what they ever asked and served, and when two rounds in a row give the same sum, nothing moved in between.
"""

import atexit
import importlib
import logging
import os
import threading
import time
from typing import Any

import msgspec

from telegrad.errors import AlreadyInitialized, RendezvousError, ShutdownError, TelegradError, WorkerDied
from telegrad.ids import MAX_GENERATION, WorkerId, draw_incarnation, generation_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.barrier import Book
from telegrad.rpc.current import current_agent, require_agent, set_current_agent
from telegrad.rpc.devices import as_published
from telegrad.rpc.invoke import serve_call
from telegrad.rpc.options import DEFAULT_SHUTDOWN_TIMEOUT, RpcBackendOptions
from telegrad.rpc.rendezvous import MeetingPlace, open_store, wait_for_ranks
from telegrad.rpc.session import Request
from telegrad.rpc.waits import install as install_waits
from telegrad.rpc.workers import Member, check_id, check_name
from telegrad.transport.addresses import Listeners, host_identity
from telegrad.wire.messages import Barrier, BarrierReply, PythonCall

log = logging.getLogger("telegrad.rpc")

_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 0.001
_ASK_SECONDS = 1.0
_DELIVERY_SECONDS = 5.0

# The layers above, each with an `install(agent)` that puts its handlers and hooks on an agent. By name: this layer
# imports none of them.
_LAYERS = ("telegrad.rref", "telegrad.engine")

_lock = threading.Lock()


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a worker: it can then call the others and be called by them.

    Args:
        name: unique among the workers: letters, digits, `_`, `:` and `-`.
        backend: accepted for compatibility; there is one backend.
        rank: the id of this worker, from 0; in a job of open size it may be left out.
        world_size: how many workers there are; None if they may come and go at any time.
        rpc_backend_options: see `RpcBackendOptions`.

    Returns when all `world_size` workers are there. RendezvousError at the deadline names those that are missing.
    """
    options = RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    if not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    check_name(name)
    rank, world_size = _from_environment(options.init_method, rank, world_size)
    if world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of worker {name!r} is not within 0..{world_size - 1}")
    start_worker(name, rank, world_size, options)


def start_worker(name: str, rank: int, world_size: int | None, options: RpcBackendOptions, store: Any = None) -> Agent:
    """Start the agent of this process; the workers meet in `store`, or where the options say."""
    with _lock:
        if current_agent() is not None:
            raise AlreadyInitialized("RPC is already initialized: call rpc.shutdown() before init_rpc() again")
        return _start(name, rank, world_size, options, store)


def _from_environment(init_method: str, rank: int, world_size: int | None) -> tuple[int, int | None]:
    if init_method.startswith("env://") and world_size is None and rank < 0 and "WORLD_SIZE" in os.environ:
        return int(os.environ.get("RANK", "-1")), int(os.environ["WORLD_SIZE"])
    if world_size is not None and world_size <= 0:
        raise ValueError(f"world_size must be positive, or None for a job of open size, got {world_size}")
    return rank, world_size


def _start(name: str, rank: int, world_size: int | None, options: RpcBackendOptions, store: Any) -> Agent:
    if store is None:
        store = open_store(options.init_method, rank, world_size, options.rendezvous_timeout)
    try:
        place = MeetingPlace(store, "static" if world_size else "open")
        worker_id = rank if rank >= 0 else place.next_id()
        check_id(worker_id)
        secret = options.secret_bytes
        listeners = Listeners(options.transports, (options.host or _LOOPBACK) if secret else _LOOPBACK)
        if secret is None:
            secret = place.agree_on_secret()
        incarnation = draw_incarnation(_generation(place, worker_id))
    except RuntimeError as error:
        if isinstance(error, TelegradError):
            raise
        raise RendezvousError(f"the meeting place {options.init_method!r} failed: {error}") from error
    member = Member(
        name,
        WorkerId(worker_id),
        incarnation,
        tuple(listeners.addresses),
        os.getpid(),
        device_maps=as_published(options),
        host=host_identity(),
    )
    agent = Agent(member, secret, options, listeners, place)
    agent.world_size = world_size
    register_handlers(agent)
    try:
        agent.start()
        for layer in _LAYERS:
            importlib.import_module(layer).install(agent)
        set_current_agent(agent)  # before the others know of this worker: their first call may use it
        _meet(agent, place, member, world_size)
        agent.health.start()
    except BaseException as error:
        set_current_agent(None)
        if not isinstance(error, _NameClash):  # the other one must find this record to see the clash, too
            _leave(agent)
        agent.close(farewell=False)
        raise
    return agent


def _generation(place: MeetingPlace, worker_id: int) -> int:
    generation = place.next_generation(worker_id)
    if generation > MAX_GENERATION:
        raise RendezvousError(
            f"worker id {worker_id} was started {generation} times in this job: start it under another id"
        )
    return generation


def _meet(agent: Agent, place: MeetingPlace, member: Member, world_size: int | None) -> None:
    generation = generation_of(member.incarnation)
    # Who has been here this time, though it may have left again already: it is not waited for.
    came: set[int] = set()
    clashes: list[RendezvousError] = []

    def take(members: list[Member]) -> None:
        try:
            _check_clash(agent, members, member, world_size)
        except RendezvousError as clash:
            clashes.append(clash)
        agent.learn([m for m in members if m.worker_id != member.worker_id])
        came.update(m.worker_id for m in members if generation_of(m.incarnation) >= generation)

    def present() -> set[int]:
        if clashes:
            raise clashes[0]
        return came | {int(m.worker_id) for m in agent.directory.members()}

    agent.take_news = take  # a call that is served meanwhile may look for its own callee, and read the news first
    try:
        place.publish(member)  # before looking for clashes, so that both sides of one see it
        place.news(take)
        present()
        if world_size is not None:
            wait_for_ranks(place, take, present, world_size, agent.options.rendezvous_timeout)
    finally:
        agent.take_news = agent.learn


def _check_clash(agent: Agent, members: list[Member], mine: Member, world_size: int | None) -> None:
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
            raise _NameClash(
                f"RPC worker name {member.name!r} is not unique: workers {other.worker_id} and {member.worker_id} both "
                "use it. Give each worker a name of its own"
            )


class _NameClash(RendezvousError):
    """Two workers of one name."""


def _answers(agent: Agent, member: Member) -> bool:
    try:
        agent.link(member).connection()
    except (TelegradError, OSError):
        return False
    return True


def register_handlers(agent: Agent) -> None:
    """Let an agent serve calls, barriers and questions about who waits for whom."""
    book = Book()
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
        agent.crew.submit(settle)

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

    agent.health.expected.append(missing)
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
        keeper = min(living, key=lambda m: m.worker_id)
        left = 0.0 if deadline == float("inf") else max(deadline - time.monotonic(), 1e-3)
        try:
            reply = agent.ask(
                keeper,
                Barrier(key, agent.info.name, activity),
                timeout=left,
                what=lambda: f"reaching the barrier {key!r}",
            )
        except WorkerDied:
            agent.lost(keeper, f"worker {keeper.name!r} ended while others waited at a barrier")
            continue  # the next worker keeps the book
        assert type(reply) is BarrierReply
        return reply.activity


def _missing(agent: Agent, key: str) -> str:
    """Who has not reached a barrier, in words."""
    keeper = min((m for m in agent.directory.members() if not agent.is_dead(m)), key=lambda m: m.worker_id)
    try:
        reply = agent.ask(keeper, Barrier(key, "", 0), timeout=_ASK_SECONDS, what=lambda: f"who is missing at {key!r}")
    except TelegradError:
        return f"perhaps {keeper.name}, which does not answer"
    assert type(reply) is BarrierReply
    return ", ".join(reply.missing)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End this worker.

    A graceful shutdown waits until all workers have called it and nothing is under way, up to `timeout` seconds (0: as
    long as the others live); at the deadline it ends all the same and raises ShutdownError, which says who and what was
    missing. Workers that died are not waited for. With `graceful=False` it ends at once.
    """
    agent = require_agent()
    try:
        if graceful:
            wait_for_all(agent, timeout)
    finally:
        with _lock:
            if current_agent() is agent:
                set_current_agent(None)
        _leave(agent)
        agent.close()


def wait_for_all(agent: Agent, timeout: float, leaving: bool = True) -> None:
    """Wait until all workers wait here and nothing is under way. Those `leaving` let go of what they hold first."""
    deadline = time.monotonic() + timeout if timeout else float("inf")
    if agent.world_size is None:
        _drain(agent, deadline, timeout)
        for prepare in agent.before_shutdown:
            prepare()
        _deliver(agent, deadline)
        return
    # All leave together: those who are quicker have said so before the last barrier, and still take part in it.
    agent.take_news = lambda members: agent.learn([m for m in members if not m.leaving])
    try:
        _wait_for_all_together(agent, deadline, timeout, leaving)
    finally:
        agent.take_news = agent.learn
    if leaving:
        _deliver(agent, deadline)


def _wait_for_all_together(agent: Agent, deadline: float, timeout: float, leaving: bool) -> None:
    previous = -1
    generation = 0
    while True:
        _drain(agent, deadline, timeout)
        activity = agent.calls_made + agent.calls_served
        try:
            total = barrier(agent, f"shutdown/{generation}", activity, deadline)
        except TimeoutError as error:
            missing = _missing(agent, f"shutdown/{generation}")
            raise ShutdownError(
                f"shutdown of worker {agent.info.name!r} gave up after {timeout:g} s: not every worker has called it, "
                f"or is done with its work. Missing: {missing}"
            ) from error
        if generation == 0:
            for prepare in agent.before_shutdown if leaving else ():
                prepare()
        elif total == previous:
            break
        previous = total
        generation += 1
    if leaving:
        # Whoever comes back to this meeting place must find that all have left it, also those slower to leave.
        _leave(agent)
        barrier(agent, "shutdown/left", 0, deadline)


def _leave(agent: Agent) -> None:
    """Put on record that this worker is gone, once."""
    if agent.place is not None:
        place, agent.place = agent.place, None
        try:
            place.publish(msgspec.structs.replace(agent.member, leaving=True))
        except RuntimeError as error:
            log.debug("the meeting place is gone: %s", error)


def _drain(agent: Agent, deadline: float, timeout: float) -> None:
    """Wait until nothing this worker asked or serves is under way. Barriers do not count: they wait for us."""
    while True:
        waiting = agent.under_way()
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise ShutdownError(
                f"shutdown of worker {agent.info.name!r} gave up after {timeout:g} s; still under way: "
                f"{', '.join(waiting[:10])}"
            )
        time.sleep(_LOOK_SECONDS)


def _deliver(agent: Agent, deadline: float) -> None:
    """Give the last answers a moment to reach those who asked, who may be slow to take them in."""
    until = min(deadline, time.monotonic() + _DELIVERY_SECONDS)
    for session in agent.sessions():
        session.deliver(until)


def _at_exit() -> None:
    agent = current_agent()
    if agent is not None:
        set_current_agent(None)
        agent.close()


atexit.register(_at_exit)
