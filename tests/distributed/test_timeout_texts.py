"""A timeout says where the time went: running and where, waiting for another, not begun, not heard of."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad import rpc
from telegrad.errors import RpcTimeout
from telegrad.rpc.server.answers import MOST_RUNNING
from tests.cluster import Cluster, cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with cluster(3) as job:
        for name in job.others:
            rpc.rpc_sync(name, slow, (0.0,))  # this module is imported there now, and not within a deadline below
        yield job


def slow(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not rpc.cancelled():
        time.sleep(0.005)


def ask_another(to: str, seconds: float) -> None:
    rpc.rpc_sync(to, slow, (seconds,), timeout=30)


async def later(seconds: float) -> None:
    await asyncio.sleep(seconds)


_gate = asyncio.Event()


async def until_open() -> None:
    await _gate.wait()


async def open_here() -> None:
    _gate.set()


def open_on(to: str) -> None:
    rpc.rpc_sync(to, open_here)


def pid() -> int:
    return os.getpid()


def text_of(to: str, func: object, args: tuple[object, ...], timeout: float = 0.5) -> str:
    with pytest.raises(RpcTimeout, match=re.escape(f"set timeout ({round(timeout * 1000)} ms)")) as caught:
        rpc.rpc_sync(to, func, args, timeout=timeout)
    return str(caught.value)


def test_it_runs(workers: Cluster) -> None:
    text = text_of("worker1", slow, (20.0,))
    assert re.search(
        r"worker 'worker1' has been running it for \d+ ms, now at .*test_timeout_texts\.py:\d+, in slow", text
    )
    assert text.endswith("Pass a longer `timeout` if that is expected")


def test_it_waits_for_another(workers: Cluster) -> None:
    text = text_of("worker1", ask_another, ("worker2", 4.0))
    assert re.search(r"in ask_another, where it has waited \d+ ms for slow\(\) on worker 'worker2'", text)


def test_a_coroutine(workers: Cluster) -> None:
    assert "as a coroutine, or for a future that is not done" in text_of("worker1", later, (20.0,))


def test_a_worker_that_is_stopped(workers: Cluster) -> None:
    stopped = rpc.rpc_sync("worker2", pid)
    os.kill(stopped, signal.SIGSTOP)
    timer = threading.Timer(20, os.kill, (stopped, signal.SIGCONT))
    timer.start()
    begun = time.monotonic()
    try:
        text = text_of("worker2", pid, ())
    finally:
        timer.cancel()
        timer.join()
        os.kill(stopped, signal.SIGCONT)
    assert re.search(
        r"does not say where it is, and nothing came from it for \d\.\d s: it is stopped, or too busy", text
    )
    assert time.monotonic() - begun < 15
    assert rpc.rpc_sync("worker2", pid) == stopped


def test_a_future_that_nobody_waits_for(workers: Cluster) -> None:
    future = rpc.rpc_async("worker1", slow, (20.0,), timeout=0.5)
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    begun = time.monotonic()
    assert ended.wait(15)
    assert time.monotonic() - begun > 0.4
    with pytest.raises(RpcTimeout, match=r"'worker1' has been running it for \d+ ms, now at .*, in slow"):
        future.wait()


def test_one_that_somebody_comes_to_wait_for_while_the_worker_is_asked(workers: Cluster) -> None:
    stopped = rpc.rpc_sync("worker2", pid)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    try:
        futures = [rpc.rpc_async("worker2", pid, timeout=0.5) for _ in range(20)]
        time.sleep(0.6)  # their time is up, and the worker has not said anything
        begun = time.monotonic()
        for future in futures:
            with pytest.raises(RpcTimeout, match=r"it is stopped, or too busy|may still be running it"):
                future.wait()
        assert time.monotonic() - begun < 10  # all of them together, not one after the other
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert rpc.rpc_sync("worker2", pid) == stopped


def test_a_worker_that_takes_no_more(workers: Cluster) -> None:
    running = [rpc.rpc_async("worker1", until_open) for _ in range(MOST_RUNNING + 10)]
    text = text_of("worker1", pid, (), timeout=2.0)
    assert f"has not read it: {MOST_RUNNING} requests of this worker run there" in text
    rpc.rpc_sync("worker2", open_on, ("worker1",))
    for future in running:
        future.wait()
    assert "takes no more" not in text_of("worker1", slow, (20.0,))


class Sleeper:
    def nap(self, seconds: float) -> None:
        slow(seconds)


def test_a_method_is_named(workers: Cluster) -> None:
    sleeper = rpc.remote("worker1", Sleeper)
    sleeper.rpc_sync().nap(0.0)
    with pytest.raises(RpcTimeout, match=r"nap\(\) of <RRef .* of 'worker1': Sleeper> did not return"):
        sleeper.rpc_sync(timeout=0.5).nap(20.0)
