"""Rendezvous stores in a store in memory: what survives the loss of the store, and who opens one."""

import socket

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from telegrad.errors import RendezvousError
from telegrad.ids import Incarnation, WorkerId, draw_incarnation, generation_of
from telegrad.rpc.job import store as store_host
from telegrad.rpc.job.job_marker import JobMarker
from telegrad.rpc.job.member_log import MemberLog, open_store
from telegrad.rpc.job.member_log import _encode as encode_member
from telegrad.rpc.trust.seal import UNSEALED
from telegrad.rpc.workers import Member


def record(worker_id: int, incarnation: int) -> Member:
    return Member(f"w{worker_id}", WorkerId(worker_id), Incarnation(incarnation), (), 0)


def read(place: MemberLog) -> list[int]:
    ids: list[int] = []
    place.news(lambda members: ids.extend(int(m.worker_id) for m in members))
    return ids


def test_news_come_once() -> None:
    place = MemberLog(HashStore(), JobMarker("open"))
    place.publish(record(0, 1024))
    place.publish(record(1, 1024))
    assert read(place) == [0, 1]
    assert read(place) == []
    place.read_again()
    assert read(place) == [0, 1]


def test_one_who_died_while_writing_hides_nobody() -> None:
    store = HashStore()
    place, slow = MemberLog(store, JobMarker("open")), MemberLog(store, JobMarker("open"))
    index = int(slow._open_log().add("records", 1)) - 1  # the first half of `publish`
    place.publish(record(1, 1024))
    assert read(place) == [1]
    assert read(place) == []
    slow._open_log().set(f"record/{index}", UNSEALED.seal(encode_member(record(0, 1024))))  # it was slow, not dead
    assert read(place) == [0]
    assert read(place) == []


def test_one_kind_of_job_in_a_store() -> None:
    store = HashStore()
    MemberLog(store, JobMarker("open"))
    with pytest.raises(RendezvousError, match="world_size"):
        MemberLog(store, JobMarker("static"))


def test_a_lost_place_says_so_and_a_new_one_begins_empty() -> None:
    place = MemberLog(HashStore(), JobMarker("open"))
    place.publish(record(0, 1024))
    place.lose()
    assert read(place) == []
    with pytest.raises(RuntimeError, match="rendezvous store has gone"):
        place.publish(record(1, 1024))
    place.move(HashStore(), lambda: place.publish(record(1, 1024)))
    assert read(place) == [1]


def test_ids_and_generations_go_on_where_the_lost_log_had_been() -> None:
    survivor, newcomer = Incarnation(7 << 10), Incarnation(9 << 10 | 3)
    place = MemberLog(HashStore(), JobMarker("open"))
    place.restore({WorkerId(1): survivor, WorkerId(4): newcomer})
    place.restore({WorkerId(1): survivor})  # another survivor, which knows less
    assert place.next_id() == 5
    assert [place.next_generation(1), place.next_generation(4), place.next_generation(0)] == [1, 4, 0]
    assert [place.next_generation(1), place.next_generation(4)] == [2, 5]


def test_one_that_thought_itself_the_first_learns_better() -> None:
    place = MemberLog(HashStore(), JobMarker("static"))
    mine = draw_incarnation(place.next_generation(0))
    assert not place.is_outdated(0, mine)
    place.restore({WorkerId(0): draw_incarnation(0), WorkerId(1): draw_incarnation(0)})
    assert place.is_outdated(0, mine)
    mine = draw_incarnation(place.next_generation(0))
    assert generation_of(mine) == 1
    assert not place.is_outdated(0, mine)


def test_a_place_that_was_joined_before_it_moved_is_not_outdated() -> None:
    place = MemberLog(HashStore(), JobMarker("static"))
    mine = draw_incarnation(place.next_generation(0))
    place.restore({WorkerId(0): mine})
    assert not place.is_outdated(0, mine)


# --- where a TCP store is, and who opens it ---


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("tcp://host:12", ("host", 12)),
        ("tcp://[::1]:12", ("::1", 12)),
        ("env://", ("there", 99)),
        ("tcp://host:12?use_libuv=0", None),
        ("tcp://host", None),
        ("file:///path", None),
    ],
)
def test_where_a_store_is(method: str, place: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "99")
    assert store_host.place_in(method) == place


def test_the_launchers_store_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "99")
    assert not store_host.is_launchers(("there", 99))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert store_host.is_launchers(("there", 99))
    assert not store_host.is_launchers(("there", 98))


def test_the_second_to_open_joins_the_first(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    place = ("127.0.0.1", port)
    first = store_host.attempt(place, opens=True, seconds=5)
    second = store_host.attempt(place, opens=True, seconds=5)
    first.set("a", "b")
    assert second.get("a") == b"b"
    assert store_host.place_of(second) == place
    with store_host.watch(place) as watch, store_host.watch_store(second, place) as beacon:
        assert beacon.getpeername()[1] != port
        del first
        watch.settimeout(5)
        assert watch.recv(1) == b""
        beacon.settimeout(5)
        with pytest.raises(ConnectionResetError):
            beacon.recv(1)
    with pytest.raises(ConnectionRefusedError):
        store_host.attempt(place, opens=False, seconds=5)
    assert capfd.readouterr().err == ""


def test_a_store_without_a_beacon_is_watched_itself(port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with store_host.watch_store(store, ("127.0.0.1", port)) as watch:
        assert watch.getpeername()[1] == port


def test_an_address_of_another_machine_is_not_taken() -> None:
    assert store_host.is_here("127.0.0.1")
    assert store_host.is_here("localhost")
    assert not store_host.is_here("192.0.2.1")  # of a network that is for documentation only
    assert not store_host.is_here("no.such.host.invalid")


def test_nobody_there_is_an_error_at_the_deadline(port: int) -> None:
    with pytest.raises(RendezvousError, match=rf"127.0.0.1:{port}.*rank 0 opens"):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.1)
