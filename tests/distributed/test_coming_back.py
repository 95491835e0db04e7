"""Jobs on engines: workers are killed, started again, started twice, given wrong sizes, and find strangers."""

import contextlib
import http.server
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from telegrad import rpc
from telegrad.errors import RendezvousError, WorkerDied
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.job import join as joining
from telegrad.rpc.job.barrier import Barriers
from tests.cluster import end, join, process
from tests.distributed.test_membership import wait_for_rank
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LIFE = 170.0  # seconds after which a process ends that was forgotten: longer than any test may take


@pytest.fixture(params=["file", "tcp"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting" if request.param == "file" else f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(autouse=True)
def no_agent_is_left() -> Iterator[None]:
    yield
    if current_agent() is not None:
        rpc.shutdown(graceful=False)


@contextmanager
def processes() -> Iterator[list[Any]]:
    started: list[Any] = []
    try:
        yield started
    finally:
        end(started, patience=0)


def await_ends(started: list[Any], seconds: float = 60) -> list[int | None]:
    deadline = time.monotonic() + seconds
    for each in started:
        each.join(max(0.0, deadline - time.monotonic()))
    return [each.exitcode for each in started]


# --- what runs on the workers ---

_go = threading.Event()


def go() -> None:
    _go.set()


def tell_to_go(name: str) -> None:
    with contextlib.suppress(WorkerDied):  # it may be gone before its answer
        rpc.rpc_sync(name, go)


def serve_then_shut_down(name: str, rank: int, size: int | None, meeting: str) -> None:
    join(name, rank, size, meeting, {})
    _go.wait(LIFE)
    rpc.shutdown(timeout=90)


def serve_then_exit(name: str, rank: int, size: int | None, meeting: str) -> None:
    join(name, rank, size, meeting, {})
    _go.wait(LIFE)


def serve_forever(name: str, rank: int, size: int | None, meeting: str) -> None:
    join(name, rank, size, meeting, {})
    threading.Event().wait(LIFE)


def serve_and_say_so(name: str, rank: int, size: int | None, meeting: str, mark: str) -> None:
    join(name, rank, size, meeting, {})
    Path(mark).touch()
    threading.Event().wait(LIFE)


def who() -> str:
    return rpc.get_worker_info().name


def names_known() -> list[str]:
    return [m.name for m in require_agent().directory.members()]


# --- restarts ---


def test_all_shut_down_after_the_first_rank_was_started_again(anywhere: str) -> None:
    with processes() as started:
        started += [process(serve_then_shut_down, f"w{rank}", rank, 4, anywhere) for rank in (0, 1, 2)]
        join("w3", 3, 4, anywhere, {})
        assert rpc.rpc_sync("w0", who) == "w0"
        rpc.rpc_sync("w1", rpc.rpc_sync, ("w0", who))  # w1 was in touch with the first w0, w2 was not
        started[0].kill()
        started[0].join()
        started[0] = process(serve_then_shut_down, "w0", 0, 4, anywhere)
        wait_until(lambda: _answers("w0"), 60)
        for name in ("w0", "w1", "w2"):
            rpc.rpc_sync(name, go)
        rpc.shutdown(timeout=60)
        assert await_ends(started) == [0, 0, 0]


def test_the_first_rank_comes_back_while_others_wait_in_their_shutdown(anywhere: str) -> None:
    with processes() as started:
        started += [process(serve_then_shut_down, f"w{rank}", rank, 3, anywhere) for rank in (0, 1)]
        join("w2", 2, 3, anywhere, {})
        rpc.rpc_sync("w0", who)
        rpc.rpc_sync("w1", go)  # it waits at w0, then coordinates itself, then has to leave that to w0 again
        started[0].kill()
        started[0].join()
        started[0] = process(serve_then_shut_down, "w0", 0, 3, anywhere)
        wait_until(lambda: _answers("w0"), 60)
        rpc.rpc_sync("w0", go)
        rpc.shutdown(timeout=60)
        assert await_ends(started) == [0, 0]


def test_who_died_at_a_barrier_has_not_come_for_its_successor(anywhere: str) -> None:
    with processes() as started:
        started.append(process(serve_then_shut_down, "w1", 1, 2, anywhere))
        join("w0", 0, 2, anywhere, {})
        barriers = require_agent().layer(Barriers)
        tell_to_go("w1")
        wait_until(lambda: barriers.missing("shutdown/0") == ["w0"], 60)
        started[0].kill()
        started[0].join()
        started[0] = process(serve_then_shut_down, "w1", 1, 2, anywhere)
        wait_until(lambda: _answers("w1"), 60)
        assert barriers.missing("shutdown/0") == ["w0", "w1"]
        rpc.rpc_sync("w1", go)
        rpc.shutdown(timeout=60)
        assert await_ends(started) == [0]


def _answers(name: str) -> bool:
    try:
        return bool(rpc.rpc_sync(name, who, timeout=20) == name)
    except (WorkerDied, TimeoutError):
        return False


def test_an_open_job_admits_others_after_a_restart(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    with processes() as started:
        started.append(process(serve_forever, "a", -1, None, meeting))
        started.append(process(serve_forever, "b", -1, None, meeting))
        join("first", -1, None, meeting, {})
        try:
            wait_until(lambda: _known("a") and _known("b"))
            started[1].kill()
            started[1].join()
            started.append(process(serve_forever, "b", -1, None, meeting))
            wait_until(lambda: _answers("b"), 60)
            started.append(process(serve_forever, "c", -1, None, meeting))
            wait_until(lambda: _known("c"), 60)
            assert rpc.rpc_sync("c", who) == "c"
            assert rpc.rpc_sync("c", rpc.rpc_sync, ("b", who)) == "b"
        finally:
            rpc.shutdown(graceful=False)


def _known(name: str) -> bool:
    try:
        return bool(rpc.get_worker_info(name))
    except ValueError:
        return False


def test_records_of_a_start_that_all_died_in_do_not_count(anywhere: str, tmp_path: Path) -> None:
    """All workers are killed and started again, as torchrun does; the first waits for the others, not their records."""
    with processes() as started:
        marks = [tmp_path / f"joined{rank}" for rank in range(3)]
        started += [process(serve_and_say_so, f"w{rank}", rank, 3, anywhere, str(marks[rank])) for rank in range(3)]
        wait_until(lambda: all(mark.exists() for mark in marks), 60)
        end(started, patience=0)
        started.clear()
        first = threading.Thread(target=lambda: join("w0", 0, 3, anywhere, {}))
        first.start()
        first.join(1.0)
        assert first.is_alive()  # it waits
        started += [process(serve_forever, f"w{rank}", rank, 3, anywhere) for rank in (1, 2)]
        first.join(130)
        try:
            assert [rpc.rpc_sync(rank, who) for rank in (1, 2)] == ["w1", "w2"]
        finally:
            rpc.shutdown(graceful=False)


# --- what is not this job ---


@pytest.fixture(params=["silent", "http"])
def strangers_port(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "silent":
        with socket.create_server(("127.0.0.1", 0)) as sock:
            yield sock.getsockname()[1]
        return
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_port_that_another_program_holds_is_named(strangers_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=rf"port {strangers_port} .*held by process {os.getpid()} \(.*python"):
        join("w0", 0, 2, f"tcp://127.0.0.1:{strangers_port}", {"rendezvous_timeout": 100})
    assert time.monotonic() - began < 60
    assert "frame #" not in capfd.readouterr().err


def open_store_and_wait(port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    threading.Event().wait(LIFE)
    del store


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_of_another_program_is_not_joined(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.rpc.job.rendezvous.member_log._MARKER_SECONDS", 0.5, raising=False)
    port = free_port()
    with processes() as started:
        started.append(process(open_store_and_wait, port))
        wait_until(lambda: _listens(port))
        with pytest.raises(RendezvousError, match="belongs to another program"):
            join(f"w{rank}", rank, 2, f"tcp://127.0.0.1:{port}", {"rendezvous_timeout": 40})


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_second_job_at_one_address_fails_and_the_first_goes_on(anywhere: str) -> None:
    with processes() as started:
        started += [process(serve_then_shut_down, f"w{rank}", rank, 3, anywhere) for rank in (0, 1)]
        join("w2", 2, 3, anywhere, {})
        second = process(join_and_report, anywhere)
        second.join(60)
        assert second.exitcode == 7  # it was refused
        assert rpc.rpc_sync("w0", who) == "w0"
        assert rpc.rpc_sync("w1", rpc.rpc_sync, ("w0", who)) == "w0"
        for name in ("w0", "w1"):
            rpc.rpc_sync(name, go)
        rpc.shutdown(timeout=60)
        assert await_ends(started) == [0, 0]


def join_and_report(meeting: str) -> None:
    joining._DYING_SECONDS = 0.5
    try:
        join("w0", 0, 3, meeting, {})
    except RendezvousError as error:
        sys.exit(7 if re.search(r"rank 0 .* is taken: worker 'w0' \(process \d+\) runs", str(error)) else str(error))
    rpc.shutdown(graceful=False)


def test_different_sizes_are_told_to_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.rpc.job.attendance._FIRST_NOTICE", 1.0)
    process(str).join()  # whatever has to be imported for the other is imported before the time begins
    for seconds in (3, 12, 48):  # for which the first waits: on a slow machine the other may come too late
        anywhere = f"file://{tmp_path}/meeting{seconds}"
        with caplog.at_level(logging.WARNING, "telegrad"):
            told, status = _meet_one_of_another_size(anywhere, seconds)
        if "world_size=3" in told:
            break
    assert status == 1
    assert "world_size=2" in told and "world_size=3" in told
    assert any("turned away" in record.message and "world_size=3" in record.message for record in caplog.records)
    # And while it waited, a line said for whom.
    assert any(re.search(r"waiting for ranks \[1\] of 2 since \d+ s", record.message) for record in caplog.records)


def _meet_one_of_another_size(anywhere: str, seconds: float) -> tuple[str, int | None]:
    """What one is told that waits for so long, and the exit status of the other."""
    errors: list[str] = []

    def first() -> None:
        try:
            join("w0", 0, 2, anywhere, {"rendezvous_timeout": seconds})
        except RendezvousError as error:
            errors.append(str(error))

    with processes() as started:
        thread = threading.Thread(target=first)
        thread.start()
        wait_for_rank(0, anywhere)
        started.append(process(serve_forever, "w1", 1, 3, anywhere))
        thread.join()
        started[0].join(60 if "world_size=3" in errors[0] else 0)
        return errors[0], started[0].exitcode


# --- ends ---


def test_a_worker_that_ends_without_a_shutdown_has_exited(anywhere: str) -> None:
    with processes() as started:
        started += [process(serve_then_exit, name, rank, 3, anywhere) for rank, name in ((1, "w1"), (2, "w2"))]
        join("w0", 0, 3, anywhere, {})
        try:
            rpc.rpc_sync("w1", tell_to_go, ("w2",))  # one that this worker never spoke to,
            tell_to_go("w1")  # and one it was in touch with
            assert await_ends(started) == [0, 0]
            for name in ("w1", "w2"):
                with pytest.raises(WorkerDied, match=f"'{name}' exited without calling rpc.shutdown"):
                    rpc.rpc_sync(name, who)
        finally:
            rpc.shutdown(graceful=False)


def test_the_host_of_the_store_has_exited() -> None:
    """Its last record stood in its own store; a worker that never spoke to it reads it all the same."""
    meeting = f"tcp://127.0.0.1:{free_port()}"
    with processes() as started:
        started += [process(serve_then_exit, name, rank, 3, meeting) for rank, name in ((0, "w0"), (1, "w1"))]
        join("w2", 2, 3, meeting, {})
        try:
            rpc.rpc_sync("w1", tell_to_go, ("w0",))
            started[0].join(60)
            assert started[0].exitcode == 0
            with pytest.raises(WorkerDied, match=r"'w0' exited without calling rpc.shutdown"):
                rpc.rpc_sync("w0", who)
            assert rpc.rpc_sync("w1", who) == "w1"  # all else goes on
            tell_to_go("w1")
        finally:
            rpc.shutdown(graceful=False)


def test_nothing_is_said_on_stderr_when_the_host_of_the_store_goes(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own client writes a C++ stack trace for each use of a store that has ended."""
    meeting = f"tcp://127.0.0.1:{free_port()}"
    with processes() as started:
        started.append(process(serve_forever, "w0", 0, 2, meeting))
        join("w1", 1, 2, meeting, {})
        try:
            place = require_agent().member_log
            assert place is not None
            place.stands = lambda: True  # as in the moment before the end is noticed
            store = place.store
            started[0].kill()
            started[0].join()
            for use in (lambda: store.add("x", 1), lambda: store.check(["x"]), lambda: store.get("x")):
                with pytest.raises(RuntimeError, match="closed"):
                    use()
        finally:
            rpc.shutdown(graceful=False)
    assert "frame #" not in capfd.readouterr().err
