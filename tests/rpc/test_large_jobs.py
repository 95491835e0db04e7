"""Jobs so large that nobody reads the records of all: here with a few agents in one process, and the limit at one."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from telegrad.cuda import order
from telegrad.errors import RendezvousError, TelegradError, UnknownWorker, WorkerDied
from telegrad.rpc.agent import Agent
from telegrad.rpc.calls import start_call, wait_for_value
from telegrad.rpc.current import set_current_agent
from telegrad.rpc.job import attendance
from telegrad.rpc.job.barrier import Barriers, barrier
from telegrad.rpc.job.debug_waits import debug_waits
from telegrad.rpc.job.join import leave, start
from telegrad.rpc.job.rendezvous import register
from telegrad.rpc.job.rendezvous.job_marker import JobMarker
from telegrad.rpc.job.rendezvous.member_log import MemberLog
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.patterns.many import get_worker_infos
from telegrad.rpc.workers import Member
from telegrad.wire.messages import Barrier, BarrierReply

FAR = 1e9


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "_READ_BY_ALL", 1)
    monkeypatch.setattr(order, "active", order.active)  # a map with a CUDA device sets it for the process


class CountingStore:
    """A store that counts the bytes of the values it gives out. Numbers are left out: how often a worker that waits
    looks at one depends on the machine."""

    def __init__(self) -> None:
        self._store = HashStore()
        self._lock = threading.Lock()
        self.bytes_out = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _counted(self, *values: bytes) -> None:
        with self._lock:
            self.bytes_out += sum(map(len, values))

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._counted(value)
        return value

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value = self._store.compare_set(key, expected, desired)
        self._counted(value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._counted(*values)
        return values


class Job:
    """Workers that join, each in a thread of its own. What went wrong with one stands in its place."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.agents: list[Agent] = []

    def join(self, names: dict[int, str], size: int, **options: Any) -> list[Any]:
        given = {"transports": ("memory",), "secret": "told to all", "heartbeat": 0.0, "rendezvous_timeout": 60}

        def one(rank: int) -> Any:
            try:
                agent = start(names[rank], rank, size, RpcBackendOptions(**{**given, **options}), self.store)
            except (TelegradError, ValueError) as error:
                return error
            self.agents.append(agent)
            return agent

        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(one, names))

    def end(self) -> None:
        set_current_agent(None)
        while self.agents:
            self.agents.pop().close(farewell=False)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(HashStore())
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(made.end)
        yield made


def named(size: int) -> dict[int, str]:
    return {rank: f"worker{rank}" for rank in range(size)}


def call(agent: Agent, to: str | int, func: Callable[..., Any], *args: Any) -> Any:
    return wait_for_value(start_call(agent, agent.link(agent.find(to)), func, args, {}, 60.0))


def known(agent: Agent) -> set[int]:
    return {int(member.worker_id) for member in agent.directory.members()}


def test_what_one_worker_reads_as_it_joins_does_not_depend_on_their_number() -> None:
    read = []
    for size in (8, 48):
        made = Job(CountingStore())
        try:
            assert all(isinstance(agent, Agent) for agent in made.join(named(size), size))
            read.append(made.store.bytes_out / size)
        finally:
            made.end()
    few, many = read
    assert many < 1.2 * few, "a little for a second digit in their names"


def test_those_who_are_called_are_known(job: Job) -> None:
    agents = job.join(named(5), 5)
    assert known(agents[1]) == {1}
    assert call(agents[1], "worker3", pow, 2, 3) == 8
    assert known(agents[1]) == {1, 3} and known(agents[3]) == {1, 3} and known(agents[0]) == {0}
    assert call(agents[1], 4, pow, 2, 3) == 8
    assert agents[2].directory.by_id(0).name == "worker0"
    assert agents[2].directory.by_id(5) is None and agents[2].directory.by_name("worker1") is None
    set_current_agent(agents[2])
    assert [info.id for info in get_worker_infos()] == [0, 1, 2, 3, 4]
    with pytest.raises(UnknownWorker, match=r"worker0 \(0\), worker1 \(1\).*worker4 \(4\)"):
        agents[0].find("worker9")


def test_one_that_reads_record_after_record_is_given_more_at_a_time(job: Job) -> None:
    log = job.join(named(12), 12)[0].member_log
    assert isinstance(log, MemberLog) and log.register is not None
    ids = [[int(member.worker_id) for member in log.register.records_of(who)] for who in ("worker1", 2, 4, 8, 5, 11)]
    assert ids == [[1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [5], [11]]


def test_workers_on_one_host_are_counted(job: Job) -> None:
    agents = job.join(named(3), 3)
    assert [agent.directory.workers_here(agent.member) for agent in agents] == [3, 3, 3]


def test_two_of_one_name_are_refused_by_all(job: Job) -> None:
    found = job.join({0: "a", 1: "b", 2: "b", 3: "c"}, 4)
    assert all(isinstance(error, RendezvousError) for error in found)
    assert all("'b' is not unique: workers 1 and 2" in str(error).replace("2 and 1", "1 and 2") for error in found)


def test_those_who_do_not_come_are_named(job: Job) -> None:
    (error,) = job.join({1: "b"}, 4, rendezvous_timeout=0.2)
    assert isinstance(error, RendezvousError) and "ranks [0, 2, 3] did not come" in str(error)


def test_one_that_is_started_again_is_found(job: Job) -> None:
    agents = job.join(named(4), 4)
    assert call(agents[0], "worker2", pow, 2, 3) == 8
    leave(agents[2])
    agents[2].close()
    with pytest.raises(WorkerDied):
        call(agents[1], "worker2", pow, 2, 3)  # which had never called it before
    (again,) = job.join({2: "worker2"}, 4)
    assert again.member.generation == 1
    assert [call(agent, "worker2", pow, 2, 3) for agent in agents[:2]] == [8, 8]
    assert call(again, "worker3", pow, 2, 3) == 8


def test_one_that_is_started_again_while_others_wait_for_it_is_counted(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have ended before it was: then the counter stays behind, and the records tell."""
    arrive = register.Register.arrive
    uncounted = threading.Event()

    def fail_once(self: register.Register, member: Member) -> None:
        if member.name == "worker1" and not uncounted.is_set():
            uncounted.set()
            raise WorkerDied("it ends here", worker="worker1")
        arrive(self, member)

    monkeypatch.setattr(register.Register, "arrive", fail_once)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(job.join, {0: "worker0", 2: "worker2"}, 3)
        (error,) = job.join({1: "worker1"}, 3)
        assert isinstance(error, WorkerDied)
        (again,) = job.join({1: "worker1"}, 3)
        assert again.member.generation == 1
        assert all(isinstance(agent, Agent) for agent in others.result(60))


def test_a_job_that_is_started_again_in_its_store_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "COMEBACK_SECONDS", 60.0)  # for all to come, on a machine however slow
    made = Job(CountingStore())
    try:
        read = []
        for generation in range(2):
            before = made.store.bytes_out
            agents = made.join(named(12), 12)
            assert [agent.member.generation for agent in agents] == [generation] * 12
            assert all(known(agent) <= {rank, (rank + 1) % 12, (rank + 2) % 12} for rank, agent in enumerate(agents))
            read.append(made.store.bytes_out - before)
            for agent in agents:
                leave(agent)
            made.end()
        assert read[1] < 4 * read[0], "what each left, and that of neighbours"
    finally:
        made.end()


def test_wrong_device_maps_of_one_are_refused_by_all(job: Job) -> None:
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(job.join, {0: "a", 2: "c"}, 3)
        (wrong,) = job.join({1: "b"}, 3, device_maps={"c": {"cuda:90": "cuda:91"}})
        found = [wrong, *others.result(60)]
    assert all(type(error) is ValueError for error in found), found
    assert all("Node b has source devices with invalid indices" in str(error) for error in found)


def test_maps_are_checked_with_those_they_name(job: Job) -> None:
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(job.join, {0: "a", 2: "c"}, 3)
        (mapped,) = job.join({1: "b"}, 3, device_maps={"c": {"cpu": "cpu"}})
        agents = [*others.result(60), mapped]
    assert [known(agent) for agent in agents] == [{0}, {2}, {1, 2}]


def test_a_barrier_needs_one_who_knows_all(job: Job) -> None:
    agents = job.join(named(5), 5)
    with ThreadPoolExecutor(5) as pool:
        sums = list(pool.map(lambda agent: barrier(agent, "test/0", 2, FAR), agents))
    assert sums == [10] * 5
    assert [known(agent) for agent in agents] == [{0, 1, 2, 3, 4}, {0, 1}, {0, 2}, {0, 3}, {0, 4}]
    agents[0].close()
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda agent: barrier(agent, "test/1", 2, FAR), agents[1:]))
    assert sums == [8] * 4
    assert agents[1].layer(Barriers).missing("test/2") == ["worker1", "worker2", "worker3", "worker4"]


def test_whoever_is_asked_who_is_missing_knows_all(job: Job) -> None:
    agents = job.join(named(3), 3)
    reply = agents[2].ask(agents[2].find(0), Barrier("test/0", "", 0), timeout=60, what=lambda: "who is missing")
    assert type(reply) is BarrierReply and reply.missing == ("worker0", "worker1", "worker2")


def test_whoever_asks_what_all_wait_for_knows_all(job: Job) -> None:
    agents = job.join(named(3), 3)
    set_current_agent(agents[1])
    debug_waits(cluster=True)
    assert known(agents[1]) == {0, 1, 2}


def test_each_is_asked_about_by_one_on_the_next_host() -> None:
    store = HashStore()
    marker = JobMarker("static", 5)
    logs = [MemberLog(store, marker) for _ in range(5)]
    hosts = ["left", "left", "left", "right", "right"]
    members = [Member(f"w{rank}", rank, 1 << 10, (), 1, host=hosts[rank]) for rank in range(5)]  # type: ignore[arg-type]
    for log, member in zip(logs, members, strict=True):
        assert log.publish(member) and log.register is not None
        log.register.arrive(member)
    found = [
        log.asked(lambda register, m=member: register.counterpart(m)) for log, member in zip(logs, members, strict=True)
    ]
    assert found == [3, 4, 3, 0, 1]


def test_those_not_heard_of_in_a_new_store_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All had come before the store was opened anew, and one that died has no record there."""
    made = Job(HashStore())
    try:
        agents = made.join(named(3), 3)
        new = HashStore()
        for agent in agents[:2]:  # as their `StoreRecovery` does it
            log = agent.member_log
            assert isinstance(log, MemberLog) and log.register is not None
            log.move(new)
            log.restore(agent.directory.latest())
            log.register.restore(0, log.has_met)
            log.publish(agent.member)
        agents[1].close()
        made.store = new
        monkeypatch.setattr(attendance, "COMEBACK_SECONDS", 1e-9)
        monkeypatch.setattr("telegrad.rpc.job.membership.COMEBACK_SECONDS", 1e-9)
        (again,) = made.join({1: "worker1"}, 3)
        assert again.member.generation == 1 and known(again) == {0, 1}
    finally:
        made.end()
