"""Failures at the edges: of the worker that keeps rendezvous store and barriers, in a job of open size, under load."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RpcTimeout, ShutdownError, WorkerDied
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.server.answers import MOST_RUNNING
from telegrad.wire.frames import NOTICE
from telegrad.wire.messages import Ping
from tests.cluster import cluster, end, join, process, serve
from tests.ports import free_port
from tests.waiting import stop_process, wait_until

pytestmark = pytest.mark.slow

HEARTBEAT = 0.3
OPTIONS: dict[str, Any] = {"heartbeat": HEARTBEAT}
AT_ONCE = 30.0


@contextmanager
def last_of(size: int, meeting: str) -> Iterator[list[BaseProcess]]:
    """A job in which this process has the highest rank, so that the first can be killed."""
    others = [process(serve, f"worker{rank}", rank, size, meeting, OPTIONS) for rank in range(size - 1)]
    try:
        join(f"worker{size - 1}", size - 1, size, meeting, OPTIONS)
        for rank in range(size - 1):  # a worker can be called while it still looks for the others
            while rpc.rpc_sync(f"worker{rank}", workers_known) < size:
                time.sleep(0.01)
        yield others
    finally:
        end(others, patience=0)
        if current_agent() is not None:
            rpc.shutdown(graceful=False)


def workers_known() -> int:
    return len(require_agent().directory.members())


@pytest.fixture(params=["file", "tcp"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting" if request.param == "file" else f"tcp://127.0.0.1:{free_port()}"


def test_the_first_worker_dies(meeting: str) -> None:
    """It kept the rendezvous store, with tcp://, and the book of the barriers. The others work on, and end."""
    with last_of(3, meeting) as others:
        assert rpc.rpc_sync("worker0", torch.add, args=(1, 1)) == 2
        others[0].kill()
        others[0].join()
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="worker0"):
            rpc.rpc_sync("worker0", torch.add, args=(1, 1))
        assert rpc.rpc_sync("worker1", torch.add, args=(1, 1)) == 2
        rpc.shutdown(timeout=90)
        others[1].join(AT_ONCE)
        assert others[1].exitcode == 0
        assert time.monotonic() - began < 2 * AT_ONCE


def test_the_keeper_of_a_barrier_dies_while_all_wait(meeting: str) -> None:
    with last_of(3, meeting) as others:
        began = time.monotonic()
        pid = others[0].pid
        assert pid is not None
        # Stopped, the first worker takes our arrival and answers nobody.
        stop_process(pid)
        threading.Timer(0.3, others[0].kill).start()
        rpc.shutdown(timeout=90)
        others[1].join(AT_ONCE)
        assert others[1].exitcode == 0
        assert time.monotonic() - began < 2 * AT_ONCE


def test_a_shutdown_names_the_missing_and_ends() -> None:
    with cluster(2, **OPTIONS) as made:
        busy = rpc.rpc_async("worker1", time.sleep, args=(30,), timeout=0)
        began = time.monotonic()
        with pytest.raises(ShutdownError, match="sleep"):
            rpc.shutdown(timeout=0.5)
        assert time.monotonic() - began < AT_ONCE
        with pytest.raises(WorkerDied):
            busy.wait()
        end(made.processes, patience=0)
        join("worker0", 0, 1, made.meeting + ".next", OPTIONS)  # for the end of the block


def serve_open(name: str, meeting: str) -> None:
    """A worker of a job of open size, until it is killed."""
    join(name, -1, None, meeting, OPTIONS)
    threading.Event().wait()


def test_a_name_comes_back_in_a_job_of_open_size(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    join("first", -1, None, meeting, OPTIONS)
    other = process(serve_open, "other", meeting)
    try:
        assert until_it_answers("other") == other.pid
        other.kill()
        other.join()
        other = process(serve_open, "other", meeting)
        assert until_it_answers("other") == other.pid
    finally:
        end([other], patience=0)
        rpc.shutdown(graceful=False)


def until_it_answers(name: str) -> int:
    deadline = time.monotonic() + 60
    while True:
        try:
            return int(rpc.rpc_sync(name, os.getpid))
        except (WorkerDied, ValueError):
            assert time.monotonic() < deadline
            time.sleep(0.02)


_gate = asyncio.Event()  # of the one loop in which a worker runs coroutines


async def wait_for_the_gate() -> int:
    """Holds no thread while it waits."""
    await _gate.wait()
    return 1


async def open_the_gate() -> int:
    _gate.set()
    return max(session.running for session in require_agent().peers.sessions())


def take_the_pen(held: str, free: str) -> None:
    """Keep anybody on this worker from writing to its caller until a file is there, as a reply does that the caller
    does not read."""
    connection = max((s.connection for s in require_agent().peers.sessions()), key=lambda c: c is not None)
    assert connection is not None
    with connection._write_lock:
        Path(held).touch()
        wait_until(Path(free).exists, 120)
    connection.flush()  # as a thread does that has written


def leave_a_mark(path: str) -> None:
    Path(path).touch()


def test_a_caller_that_does_not_read_is_served_all_the_same(tmp_path: Path) -> None:
    """Replies that came together are held back to share a write. That has to wait here; the timer must not, which
    finds the thread that waits for it, nor the requests that come behind."""
    held, free, mark = tmp_path / "held", tmp_path / "free", tmp_path / "mark"
    with cluster(2, heartbeat=0):
        asked = [rpc.rpc_async("worker1", take_the_pen, args=(str(held), str(free)), timeout=150)]
        wait_until(held.exists)
        try:
            connection = require_agent().links["worker1"].current
            assert connection is not None
            for _ in range(2):
                connection.send(NOTICE, 0, 0, Ping(), hold=True)
            connection.flush()  # both are read at once: the first answer waits for the second, which is written
            asked.append(rpc.rpc_async("worker1", leave_a_mark, args=(str(mark),), timeout=150))
            wait_until(mark.exists)
        finally:
            free.touch()
        for future in asked:
            future.wait()


def threads_here() -> int:
    return threading.active_count()


def test_what_a_caller_may_have_under_way_is_bounded() -> None:
    """Beyond that the worker reads no more of this caller, and goes on when there is room."""
    with cluster(3, **OPTIONS):
        asked = [rpc.rpc_async("worker1", wait_for_the_gate, timeout=150) for _ in range(MOST_RUNNING + 500)]
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", torch.add, args=(1, 1), timeout=1.5)
        # Others are served: the bound is for each caller.
        assert rpc.rpc_sync("worker2", rpc.rpc_sync, args=("worker1", open_the_gate)) <= MOST_RUNNING
        assert sum(future.wait() for future in asked) == MOST_RUNNING + 500


def test_threads_do_not_grow_with_requests() -> None:
    with cluster(2, num_worker_threads=4, **OPTIONS):
        asked = [rpc.rpc_async("worker1", time.sleep, args=(0.001,)) for _ in range(2000)]
        for future in asked:
            future.wait()
        assert rpc.rpc_sync("worker1", threads_here) < 200


def replies_remembered() -> int:
    return sum(len(session.requests.replies) for session in require_agent().peers.sessions())


_told = threading.Event()


def until_told() -> None:
    _told.wait(150)


def tell() -> None:
    _told.set()


def test_a_long_call_does_not_make_the_replies_behind_it_pile_up() -> None:
    with cluster(2, **OPTIONS):
        long = rpc.rpc_async("worker1", until_told, timeout=150)
        for _ in range(2000):
            rpc.rpc_sync("worker1", torch.add, args=(1, 1))
        assert rpc.rpc_sync("worker1", replies_remembered) < 600
        rpc.rpc_sync("worker1", tell)
        long.wait()
