"""The log of members in a store in memory: what survives the loss of the store, and who opens one."""

from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from telegrad.errors import RendezvousError
from telegrad.ids import Incarnation, WorkerId, draw_incarnation, generation_of
from telegrad.rpc.job.rendezvous import store as store_host
from telegrad.rpc.job.rendezvous.job_marker import JobMarker
from telegrad.rpc.job.rendezvous.member_log import MemberLog, open_store
from telegrad.rpc.job.rendezvous.member_log import _encode as encode_member
from telegrad.rpc.trust.seal import UNSEALED
from telegrad.rpc.workers import Member
from tests.ports import own_port


def record(worker_id: int, incarnation: int) -> Member:
    return Member(f"w{worker_id}", WorkerId(worker_id), Incarnation(incarnation), (), 0)


def read(member_log: MemberLog) -> list[int]:
    ids: list[int] = []
    member_log.news(lambda members: ids.extend(int(m.worker_id) for m in members))
    return ids


def test_news_come_once() -> None:
    member_log = MemberLog(HashStore(), JobMarker("open"))
    member_log.publish(record(0, 1024))
    member_log.publish(record(1, 1024))
    assert read(member_log) == [0, 1]
    assert read(member_log) == []
    member_log.read_again()
    assert read(member_log) == [0, 1]


def test_one_who_died_while_writing_hides_nobody() -> None:
    store = HashStore()
    member_log, slow = MemberLog(store, JobMarker("open")), MemberLog(store, JobMarker("open"))
    index = int(slow._open_log().add("records", 1)) - 1  # the first half of `publish`
    member_log.publish(record(1, 1024))
    assert read(member_log) == [1]
    assert read(member_log) == []
    slow._open_log().set(
        f"record/{index}", UNSEALED.seal(slow._job, encode_member(record(0, 1024)))
    )  # it was slow, not dead
    assert read(member_log) == [0]
    assert read(member_log) == []


def test_one_kind_of_job_in_a_store() -> None:
    store = HashStore()
    MemberLog(store, JobMarker("open"))
    with pytest.raises(RendezvousError, match="world_size"):
        MemberLog(store, JobMarker("static"))


def test_a_lost_place_says_so_and_a_new_one_begins_empty() -> None:
    member_log = MemberLog(HashStore(), JobMarker("open"))
    member_log.publish(record(0, 1024))
    member_log.lose()
    assert read(member_log) == []
    with pytest.raises(RuntimeError, match="rendezvous store has gone"):
        member_log.publish(record(1, 1024))
    member_log.move(HashStore(), lambda: member_log.publish(record(1, 1024)))
    assert read(member_log) == [1]


def test_ids_and_generations_go_on_where_the_lost_log_had_been() -> None:
    survivor, newcomer = Incarnation(7 << 10), Incarnation(9 << 10 | 3)
    member_log = MemberLog(HashStore(), JobMarker("open"))
    member_log.restore({WorkerId(1): survivor, WorkerId(4): newcomer})
    member_log.restore({WorkerId(1): survivor})  # another survivor, which knows less
    assert member_log.next_id() == 5
    assert [member_log.next_generation(1), member_log.next_generation(4), member_log.next_generation(0)] == [1, 4, 0]
    assert [member_log.next_generation(1), member_log.next_generation(4)] == [2, 5]


def test_one_that_thought_itself_the_first_learns_better() -> None:
    member_log = MemberLog(HashStore(), JobMarker("static"))
    mine = draw_incarnation(member_log.next_generation(0))
    assert not member_log.is_outdated(0, mine)
    member_log.restore({WorkerId(0): draw_incarnation(0), WorkerId(1): draw_incarnation(0)})
    assert member_log.is_outdated(0, mine)
    mine = draw_incarnation(member_log.next_generation(0))
    assert generation_of(mine) == 1
    assert not member_log.is_outdated(0, mine)


def test_a_place_that_was_joined_before_it_moved_is_not_outdated() -> None:
    member_log = MemberLog(HashStore(), JobMarker("static"))
    mine = draw_incarnation(member_log.next_generation(0))
    member_log.restore({WorkerId(0): mine})
    assert not member_log.is_outdated(0, mine)


# --- where a TCP store is, and who opens it ---


@pytest.fixture
def port() -> Iterator[int]:
    with own_port() as found:
        yield found


@pytest.mark.parametrize(
    ("method", "member_log"),
    [
        ("tcp://host:12", ("host", 12)),
        ("tcp://[::1]:12", ("::1", 12)),
        ("env://", ("there", 99)),
        ("tcp://host:12?use_libuv=0", None),
        ("tcp://host", None),
        ("file:///path", None),
    ],
)
def test_where_a_store_is(method: str, member_log: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "99")
    assert store_host.endpoint_in(method) == member_log


def test_the_launchers_store_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "99")
    assert not store_host.is_launchers(("there", 99))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert store_host.is_launchers(("there", 99))
    assert not store_host.is_launchers(("there", 98))


def test_the_second_to_open_joins_the_first(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    endpoint = ("127.0.0.1", port)
    first = store_host.attempt(endpoint, opens=True, seconds=60)
    second = store_host.attempt(endpoint, opens=True, seconds=60)
    first.set("a", "b")
    assert second.get("a") == b"b"
    assert store_host.worker_endpoint_of(second) == endpoint
    with store_host.connect_silent(endpoint) as silent, store_host.connect_monitor(second, endpoint) as monitor:
        assert monitor.getpeername()[1] != port
        del first
        silent.settimeout(60)
        assert silent.recv(1) == b""
        monitor.settimeout(60)
        with pytest.raises(ConnectionResetError):
            monitor.recv(1)
    with pytest.raises(ConnectionRefusedError):
        store_host.attempt(endpoint, opens=False, seconds=60)
    assert capfd.readouterr().err == ""


def test_a_store_without_a_monitor_port_is_monitored_itself(port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with store_host.connect_monitor(store, ("127.0.0.1", port)) as silent:
        assert silent.getpeername()[1] == port


def test_an_address_of_another_machine_is_not_taken() -> None:
    assert store_host.is_here("127.0.0.1")
    assert store_host.is_here("localhost")
    assert not store_host.is_here("192.0.2.1")  # of a network that is for documentation only
    assert not store_host.is_here("no.such.host.invalid")


def test_nobody_there_is_an_error_at_the_deadline(port: int) -> None:
    with pytest.raises(RendezvousError, match=rf"127.0.0.1:{port}.*rank 0 opens"):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.1)
