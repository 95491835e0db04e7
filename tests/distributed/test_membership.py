"""How jobs begin and end: rendezvous stores, clashes, missing workers, leaving and coming back, deaths."""

import contextlib
import operator
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import (
    AlreadyInitialized,
    InvalidName,
    NotInitialized,
    RendezvousError,
    ShutdownError,
    UnknownWorker,
    WorkerDied,
)
from telegrad.ids import Incarnation, generation_of
from telegrad.rpc.current import require_agent
from telegrad.rpc.job.barrier import Barriers
from telegrad.rpc.job.rendezvous import store as store_host
from telegrad.rpc.job.rendezvous.file_store import FileStore
from telegrad.rpc.job.rendezvous.member_log import read_records
from telegrad.rpc.job.rendezvous.store_client import Prefixed
from telegrad.rpc.trust.seal import Seal
from telegrad.rpc.trust.secret import user_secret
from tests.cluster import WAYS, cluster, end, join, process
from tests.ports import free_port
from tests.waiting import wait_until

# --- what runs on the workers ---

LIFE = 170.0  # seconds after which a process ends that was forgotten: longer than any test may take


def who() -> str:
    return rpc.get_worker_info().name


def hang() -> None:
    threading.Event().wait(LIFE)


def vanish() -> None:
    os._exit(1)


def shut_down_aside() -> None:
    threading.Thread(target=lambda: rpc.shutdown(graceful=False)).start()


def join_and_shut_down(name: str, rank: int, size: int, meeting: str, options: dict[str, Any], times: int) -> None:
    for _ in range(times):
        join(name, rank, size, meeting, options)
        assert rpc.rpc_sync((rank + 1) % size, operator.add, (1, 2)) == 3
        rpc.shutdown()


def serve_until_told(name: str, rank: int, size: int | None, meeting: str) -> None:
    """A worker of an open job; leaves when its event is set by a call."""
    join(name, rank, size, meeting, {})
    _told.wait(LIFE)
    rpc.shutdown()


def serve_forever(name: str, rank: int, size: int, meeting: str) -> None:
    """A worker that never calls shutdown."""
    join(name, rank, size, meeting, {})
    threading.Event().wait(LIFE)


_told = threading.Event()


def leave() -> None:
    _told.set()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables for this process and those it starts `in_this_environment`, and for no others."""
    forkserver.ensure_running()  # with the variables as they are: it hands them down to the workers of all tests
    return monkeypatch


def in_this_environment(target: Any, *args: Any) -> Any:
    """A process with the variables that this one has by now."""
    return process(_in_environment, {name: os.environ.get(name) for name in _VARIABLES}, target, *args)


def _in_environment(variables: dict[str, str | None], target: Any, *args: Any) -> None:
    for name, value in variables.items():
        if value is not None:
            os.environ[name] = value
    target(*args)


_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TELEGRAD_SECRET")


@contextmanager
def processes() -> Iterator[list[Any]]:
    """Processes that a test starts; ended with it."""
    started: list[Any] = []
    try:
        yield started
    finally:
        end(started, patience=0)


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting"


@pytest.fixture(params=["file", "tcp", "env"])
def anywhere(request: pytest.FixtureRequest, meeting: str, environment: pytest.MonkeyPatch) -> str:
    """A rendezvous store of each kind."""
    port = free_port()
    if request.param == "env":
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", str(port))
    return {"file": meeting, "tcp": f"tcp://127.0.0.1:{port}", "env": "env://"}[request.param]


# --- beginning ---


def call_everyone(names: list[str], value: float) -> list[float]:
    """A small and a large tensor to each worker and back, all at once."""
    futures = [
        rpc.rpc_async(name, torch.add, (torch.full((count,), value), rank))
        for rank, name in enumerate(names)
        for count in (3, 30_000)
    ]
    return [float(x.mean()) for x in torch.futures.wait_all(futures)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 4, 16])
def test_jobs_of_all_sizes(size: int, way: str) -> None:
    with cluster(size, **WAYS[way]) as job:
        assert [rpc.rpc_sync(name, who) for name in job.names] == job.names
        around = rpc.rpc_sync(1, rpc.rpc_sync, (size - 1, rpc.rpc_sync, (0, who)))
        assert around == "worker0"
        everywhere = [rpc.rpc_async(name, call_everyone, (job.names, float(i))) for i, name in enumerate(job.names)]
        for i, result in enumerate(torch.futures.wait_all(everywhere)):
            assert result == [float(i + rank) for rank in range(size) for _ in range(2)]


def test_nothing_works_before_the_beginning() -> None:
    for call in (
        lambda: rpc.rpc_sync("a", who),
        lambda: rpc.rpc_async("a", who),
        rpc.get_worker_info,
        rpc.shutdown,
        rpc.get_rpc_timeout,
    ):
        with pytest.raises(NotInitialized, match="init_rpc"):
            call()


def wait_for_rank(rank: int, meeting: str, kind: str = "static") -> None:
    """Wait until a worker has said that it is there."""
    log = Prefixed(f"telegrad/{kind}", FileStore(meeting.removeprefix("file://"), -1))

    def look() -> bool:
        return any(int(member.worker_id) == rank for member in read_records(log, Seal(user_secret())))

    wait_until(look, 60)


def test_missing_ranks_are_named(meeting: str) -> None:
    with processes() as started:
        started.append(process(serve_forever, "worker2", 2, 4, meeting))
        wait_for_rank(2, meeting)
        start = time.monotonic()
        with pytest.raises(RendezvousError, match=r"\[1, 3\].*did not come"):
            join("worker0", 0, 4, meeting, {"rendezvous_timeout": 1.5})
    assert time.monotonic() - start < 60
    with pytest.raises(NotInitialized):
        rpc.get_worker_info()


def test_a_failed_rendezvous_can_be_tried_again(meeting: str) -> None:
    with pytest.raises(RendezvousError):
        join("worker0", 0, 2, meeting, {"rendezvous_timeout": 0.1})
    with processes() as started:
        started.append(process(join_and_shut_down, "worker1", 1, 2, meeting, {}, 1))
        join_and_shut_down("worker0", 0, 2, meeting, {}, 1)
        started[0].join(60)
        assert started[0].exitcode == 0


def test_two_workers_of_one_name(meeting: str) -> None:
    with processes() as started:
        started.append(process(serve_forever, "twin", 1, 2, meeting))
        with pytest.raises(RendezvousError, match=r"'twin' is not unique.*0.*1|'twin' is not unique.*1.*0"):
            join("twin", 0, 2, meeting, {"rendezvous_timeout": 60})


@pytest.mark.parametrize("rank", [-2, 2, 5])
def test_a_rank_out_of_range(meeting: str, rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank.*0\.\.1"):
        join("worker", rank, 2, meeting, {})


@pytest.mark.parametrize("name", ["", "a b", "x" * 200, "ä"])
def test_a_bad_name(meeting: str, name: str) -> None:
    with pytest.raises(InvalidName, match="Worker name must match") as caught:
        join(name, 0, 1, meeting, {})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("method", ["nonsense", "tcp://", "ftp://host:1", "file://"])
def test_a_bad_init_method(method: str) -> None:
    with pytest.raises((RendezvousError, ValueError)):
        join("worker0", 0, 1, method, {"rendezvous_timeout": 1})


def test_nobody_at_the_rendezvous_store() -> None:
    with pytest.raises(RendezvousError, match="rank 0"):
        join("worker1", 1, 2, f"tcp://127.0.0.1:{free_port()}", {"rendezvous_timeout": 0.5})


def test_a_second_beginning(meeting: str) -> None:
    join("alone", 0, 1, meeting, {})
    try:
        with pytest.raises(AlreadyInitialized, match="shutdown"):
            join("alone", 0, 1, meeting, {})
        assert rpc.rpc_sync("alone", who) == "alone"
    finally:
        rpc.shutdown()


@pytest.mark.slow
def test_again_and_again(anywhere: str) -> None:
    with processes() as started:
        started.append(in_this_environment(join_and_shut_down, "worker1", 1, 2, anywhere, {}, 5))
        join_and_shut_down("worker0", 0, 2, anywhere, {}, 5)
        started[0].join(60)
        assert started[0].exitcode == 0


def test_rank_and_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(key, str(value))
    rpc.init_rpc("alone")
    assert rpc.get_worker_info().id == 0
    rpc.shutdown()


def test_thirty_lives(meeting: str) -> None:
    before = threading.active_count()
    open_files = len(os.listdir("/proc/self/fd"))
    for i in range(30):
        join(f"life{i}", 0, 1, meeting, {})
        assert rpc.rpc_sync(f"life{i}", operator.add, (1, 2)) == 3
        rpc.shutdown(graceful=i % 2 == 0)
    wait_until(lambda: threading.active_count() <= before)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= open_files + 3)


# --- secrets ---


def call_and_report(name: str, rank: int, size: int, meeting: str, to: str, report: str) -> None:
    """A worker that calls another, and leaves word of what came of it."""
    try:
        join(name, rank, size, meeting, {})
        said = f"answered {rpc.rpc_sync(to, who)}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    beside = Path(report + "-")
    beside.write_text(said)
    beside.rename(report)
    threading.Event().wait(60)


@pytest.mark.parametrize("given", ["another", None], ids=["wrong", "missing"])
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_worker_without_the_secret(
    meeting: str,
    tmp_path: Path,
    way: str,
    given: str | None,
    environment: pytest.MonkeyPatch,
) -> None:
    """It is told at the rendezvous store, and those who have the secret notice nothing."""
    report = tmp_path / "report"
    with processes() as started:
        environment.setenv("TELEGRAD_SECRET", "told to all")
        started.append(in_this_environment(serve_forever, "friend", 1, 2, meeting))
        join("me", 0, 2, meeting, {"transports": (way,)})
        try:
            environment.delenv("TELEGRAD_SECRET")
            if given is not None:
                environment.setenv("TELEGRAD_SECRET", given)
            started.append(in_this_environment(call_and_report, "stranger", 1, 2, meeting, "me", str(report)))
            wait_until(report.exists, 60)
            assert "RendezvousError" in report.read_text()
            assert "another secret" in report.read_text()
            assert rpc.rpc_sync("friend", who) == "friend"
            assert rpc.rpc_sync("friend", rpc.rpc_sync, ("me", who)) == "me"
        finally:
            rpc.shutdown(graceful=False)


# --- open membership ---


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "tcp"])
def test_workers_come_and_go(meeting: str, way: str) -> None:
    place = meeting if way == "file" else f"tcp://127.0.0.1:{free_port()}"
    join("first", -1, None, place, {})
    with processes() as started:
        try:
            with pytest.raises(UnknownWorker):
                rpc.get_worker_info("second")
            for name in ("second", "third"):
                started.append(process(serve_until_told, name, -1, None, place))
                wait_until(lambda name=name: _found(name))
                assert rpc.rpc_sync(name, who) == name
            # Newcomers find each other and the first.
            assert rpc.rpc_sync("second", rpc.rpc_sync, ("third", rpc.rpc_sync, ("first", who))) == "first"
            rpc.rpc_sync("second", leave)
            started[0].join(60)
            assert started[0].exitcode == 0
            with pytest.raises((WorkerDied, UnknownWorker), match="second"):
                rpc.rpc_sync("second", who)
            assert rpc.rpc_sync("third", who) == "third"
            # The same name may come back.
            started.append(process(serve_until_told, "second", -1, None, place))
            wait_until(lambda: _found("second") and _answers("second"))
            assert rpc.rpc_sync("third", rpc.rpc_sync, ("second", who)) == "second"
            for name in ("second", "third"):
                rpc.rpc_sync(name, leave)
        finally:
            rpc.shutdown()
        for each in started[1:]:
            each.join(60)
            assert each.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_the_first_one_goes(anywhere: str, how: str) -> None:
    """It may have opened the rendezvous store. Newcomers find the others all the same, and so does the first one."""
    with processes() as started:
        first = in_this_environment(serve_until_told, "first", -1, None, anywhere)
        started.append(first)
        if not anywhere.startswith("file"):
            wait_until(lambda: _listens(anywhere))  # else this worker would open the place
        join("second", -1, None, anywhere, {})
        try:
            wait_until(lambda: _found("first"))
            if how == "leaves":
                rpc.rpc_sync("first", leave)
            else:
                first.kill()
            first.join(60)
            for name in ("third", "first"):
                started.append(in_this_environment(serve_until_told, name, -1, None, anywhere))
                wait_until(lambda name=name: _found(name) and _answers(name), 60)
                assert rpc.rpc_sync(name, rpc.rpc_sync, ("second", who)) == "second"
            assert rpc.rpc_sync("third", rpc.rpc_sync, ("first", who)) == "first"
            assert rpc.rpc_sync("first", rpc.rpc_sync, ("third", who)) == "third"
            ids = {rpc.get_worker_info(name).id for name in ("first", "second", "third")}
            assert len(ids) == 3
            for name in ("first", "third"):
                rpc.rpc_sync(name, leave)
        finally:
            rpc.shutdown()
        for each in started[1:]:
            each.join(60)
            assert each.exitcode == 0


PATIENTLY = {"timeout": 60, "retries": 3}  # each worker finds the new place, and so the newcomer, in its own time


@pytest.mark.slow
def test_the_first_rank_is_killed_and_started_again(anywhere: str) -> None:
    """Nobody else has to be."""
    with processes() as started:
        started.append(in_this_environment(serve_forever, "worker0", 0, 3, anywhere))
        started.append(in_this_environment(serve_forever, "worker2", 2, 3, anywhere))
        join("worker1", 1, 3, anywhere, {})
        try:
            for _ in range(2):
                pid = rpc.rpc_sync("worker0", os.getpid)
                assert rpc.rpc_sync("worker2", rpc.rpc_sync, ("worker0", os.getpid)) == pid
                started[0].kill()
                started[0].join()
                started[0] = in_this_environment(serve_forever, "worker0", 0, 3, anywhere)
                again = rpc.rpc_sync("worker0", os.getpid, timeout=60, retries=3)
                assert again == started[0].pid
                assert rpc.rpc_sync("worker2", rpc.rpc_sync, ("worker0", os.getpid), PATIENTLY) == again
                for other in ("worker1", "worker2"):
                    assert rpc.rpc_sync("worker0", rpc.rpc_sync, (other, who)) == other
        finally:
            rpc.shutdown(graceful=False)


def serve_away_from_the_place(name: str, rank: int, size: int, meeting: str) -> None:
    """A worker on another machine than that of the rendezvous store, or so it thinks: it opens no store there."""
    store_host.is_here = lambda _: False
    serve_forever(name, rank, size, meeting)


def incarnation() -> int:
    return require_agent().member.incarnation


@pytest.mark.slow
def test_the_first_rank_opens_the_place_again_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is alone on its machine: it finds no store and nobody, and is found by the others."""
    place = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(store_host, "is_here", lambda _: False)
    with processes() as started:
        started.append(process(serve_forever, "worker0", 0, 3, place))
        started.append(process(serve_away_from_the_place, "worker2", 2, 3, place))
        join("worker1", 1, 3, place, {})
        try:
            generations = [generation_of(Incarnation(rpc.rpc_sync("worker0", incarnation)))]
            for _ in range(2):
                started[0].kill()
                started[0].join()
                assert not _listens(place)
                started[0] = process(serve_forever, "worker0", 0, 3, place)
                known = rpc.rpc_sync("worker0", incarnation, timeout=60, retries=3)
                generations.append(generation_of(Incarnation(known)))
                assert rpc.rpc_sync("worker2", rpc.rpc_sync, ("worker0", incarnation), PATIENTLY) == known
                for other in ("worker1", "worker2"):
                    assert rpc.rpc_sync("worker0", rpc.rpc_sync, (other, who)) == other
            assert generations == sorted(set(generations))  # its ids are not those of one before it
        finally:
            rpc.shutdown(graceful=False)


def _listens(place: str) -> bool:
    address = place.removeprefix("tcp://") if place.startswith("tcp") else f"127.0.0.1:{os.environ['MASTER_PORT']}"
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def test_one_name_twice_in_an_open_job(meeting: str) -> None:
    with processes() as started:
        started.append(process(serve_until_told, "twin", -1, None, meeting))
        join("other", -1, None, meeting, {})
        wait_until(lambda: _found("twin"))
        rpc.shutdown()
        with pytest.raises(RendezvousError, match="'twin' is not unique"):
            join("twin", -1, None, meeting, {})


def _found(name: str) -> bool:
    try:
        rpc.get_worker_info(name)
    except UnknownWorker:
        return False
    return True


def _answers(name: str) -> bool:
    try:
        return rpc.rpc_sync(name, who) == name
    except (WorkerDied, UnknownWorker):
        return False


# --- ending ---


def test_shutdown_waits_for_work_under_way() -> None:
    with cluster(3):
        futures = [rpc.rpc_async("worker1", time.sleep, (0.2,)) for _ in range(3)]
    assert torch.futures.wait_all(futures) == [None] * 3  # what it does not wait for ends with an error


def test_a_worker_that_never_shuts_down_is_named(meeting: str) -> None:
    with processes() as started:
        started.append(process(serve_forever, "lingering", 1, 3, meeting))
        started.append(process(join_and_shut_down, "punctual", 2, 3, meeting, {}, 1))
        join("worker0", 0, 3, meeting, {})
        barriers = require_agent().layer(Barriers)
        wait_until(lambda: "punctual" not in barriers.missing("shutdown/0"))
        start = time.monotonic()
        with pytest.raises(ShutdownError, match="lingering") as caught:
            rpc.shutdown(timeout=1.0)
        assert time.monotonic() - start < 60  # it would linger for three minutes
        assert "punctual" not in str(caught.value)
        with pytest.raises(NotInitialized):
            rpc.get_worker_info()


def test_not_graceful_ends_at_once() -> None:
    with cluster(2) as job:
        future = rpc.rpc_async("worker1", hang)
        start = time.monotonic()
        rpc.shutdown(graceful=False)
        assert time.monotonic() - start < 60
        with pytest.raises(WorkerDied):
            future.wait()
        join("again", 0, 1, job.meeting + "-again", {})  # for the cluster to shut down


def test_a_dead_worker_is_not_waited_for() -> None:
    with cluster(3) as job:
        assert rpc.rpc_sync("worker2", who) == "worker2"
        job.kill("worker2")
        start = time.monotonic()
        rpc.shutdown(timeout=120)
        assert time.monotonic() - start < 60
        join("again", 0, 1, job.meeting + "-again", {})  # for the cluster to shut down


# --- deaths ---


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_worker_killed_while_serving(way: str) -> None:
    with cluster(3, transports=(way,)) as job:
        waiting = [rpc.rpc_async("worker1", hang, timeout=0) for _ in range(3)]
        errors: list[Exception] = []
        thread = threading.Thread(target=_collect, args=(errors,))
        thread.start()
        rpc.rpc_sync("worker1", who)
        start = time.monotonic()
        job.kill("worker1")
        for future in waiting:
            with pytest.raises(WorkerDied, match=r"'worker1'.*hang") as caught:
                future.wait()
            assert caught.value.worker == "worker1"
        thread.join(60)
        assert time.monotonic() - start < 60  # they have no deadline
        assert isinstance(errors[0], WorkerDied)
        with pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker1", who, timeout=0)
        assert rpc.rpc_sync("worker2", who) == "worker2"
        with pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker2", rpc.rpc_sync, ("worker1", who))


def _collect(errors: list[Exception]) -> None:
    try:
        rpc.rpc_sync("worker1", hang, timeout=0)
    except Exception as error:
        errors.append(error)


def test_a_function_that_ends_its_worker() -> None:
    with cluster(2), pytest.raises(WorkerDied, match=r"worker1.*vanish"):
        rpc.rpc_sync("worker1", vanish)


def test_a_worker_that_leaves_while_it_owes_an_answer() -> None:
    with cluster(2) as job:
        waiting = rpc.rpc_async("worker1", hang)
        leaving = rpc.rpc_async("worker1", shut_down_aside)
        with pytest.raises(WorkerDied, match=r"worker1"):
            waiting.wait()
        with contextlib.suppress(WorkerDied):  # it may be gone before its answer
            leaving.wait()
        job.kill("worker1")


# --- importing ---


def test_importing_starts_nothing() -> None:
    program = """
import os, sys, threading
import torch, torch.distributed, torch.distributed.nn  # what torch itself does is not ours
before = set(os.listdir('/proc/self/fd')), threading.active_count(), len(os.listdir('/proc/self/task'))
import telegrad
from telegrad import rpc
after = set(os.listdir('/proc/self/fd')), threading.active_count(), len(os.listdir('/proc/self/task'))
assert before == after, (before, after)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150, env=os.environ)


def test_a_worker_that_is_alone_needs_no_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with rpc.init_rpc("alone", rank=0, world_size=1) as me:
            assert rpc.rpc_sync(me, pow, (2, 3)) == 8
    with pytest.raises(RendezvousError, match=r"MASTER_ADDR and MASTER_PORT, which are not set.*telegrad run"):
        rpc.init_rpc("one", rank=0, world_size=2)
