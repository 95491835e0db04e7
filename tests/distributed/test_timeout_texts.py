"""A timeout says where the time went: running and where, waiting for another, not begun, not heard of."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from telegrad import rpc
from telegrad.errors import RpcTimeout
from telegrad.rpc.current import require_agent
from telegrad.rpc.server.answers import MOST_RUNNING
from tests.cluster import Cluster, cluster
from tests.waiting import stop_process, wait_until

pytestmark = pytest.mark.slow

TIME = r"(\d+ ms|\d+\.\d s)"
TIMEOUTS = (0.5, 2.0, 8.0, 20.0)  # the worker is asked for at most half as long again: a slow machine needs more


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with cluster(3, heartbeat=4) as job:  # one that a test stops must not be given up meanwhile
        for name in job.others:
            rpc.rpc_sync(name, slow, (0.0,))  # this module is imported there now, and not within a deadline below
        yield job


def slow(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not rpc.cancelled():
        time.sleep(0.005)


_let_go = threading.Event()


def slow_until_told() -> None:
    _let_go.wait(60)


def let_go() -> None:
    _let_go.set()


def ask_another(to: str) -> None:
    rpc.rpc_sync(to, slow_until_told)


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


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lives gets the time to say where a request is, however slow the machine."""
    monkeypatch.setattr("telegrad.rpc.client.timeouts.ASK_SECONDS", 10.0)


def text_with(pattern: str, to: str, func: object, args: tuple[object, ...]) -> str:
    """The text of a call that is sure to be late, when the worker has told in time where it is."""
    for timeout in TIMEOUTS:
        text = text_of(to, func, args, timeout)
        if re.search(pattern, text):
            return text
    raise AssertionError(f"{pattern!r} is not in {text!r}")


def test_it_runs(workers: Cluster, patience: None) -> None:
    text = text_with(
        rf"worker 'worker1' has been running it for {TIME}, now at .*test_timeout_texts\.py:\d+, in slow",
        "worker1",
        slow,
        (60.0,),
    )
    assert text.endswith("Pass a longer `timeout` if that is expected")


def test_it_waits_for_another(workers: Cluster, patience: None) -> None:
    pattern = rf"in ask_another, where it has waited {TIME} for slow_until_told\(\) on worker 'worker2'"
    try:
        text_with(pattern, "worker1", ask_another, ("worker2",))
    finally:
        rpc.rpc_sync("worker2", let_go)


def test_a_coroutine(workers: Cluster, patience: None) -> None:
    text_with("as a coroutine, or for a future or a value that is not done", "worker1", later, (60.0,))


def test_a_value_that_is_being_made(workers: Cluster, patience: None) -> None:
    value = rpc.remote("worker1", slow_until_told)
    pattern = (
        rf"to_here\(\) of .* \(made by slow_until_told\(\)\) on worker 'worker1' did not return; worker 'worker1' has "
        rf"waited {TIME} for that value to be made; a call of `remote` runs there, now at .*, in slow_until_told"
    )
    for seconds in TIMEOUTS:
        with pytest.raises(RpcTimeout) as caught:
            value.to_here(timeout=seconds)
        if re.search(pattern, str(caught.value)):
            break
    rpc.rpc_sync("worker1", let_go)
    assert re.search(pattern, str(caught.value))
    value.to_here()


def stop(name: str) -> int:
    """Stop a worker; its process, which has stopped."""
    stopped = rpc.rpc_sync(name, pid)
    stop_process(stopped)
    return stopped


def test_a_worker_that_is_stopped(workers: Cluster) -> None:
    stopped = stop("worker2")
    timer = threading.Timer(60, os.kill, (stopped, signal.SIGCONT))
    timer.start()
    begun = time.monotonic()
    try:
        text = text_of("worker2", pid, ())
    finally:
        timer.cancel()
        timer.join()
        os.kill(stopped, signal.SIGCONT)
    assert re.search(
        r"does not say where it is, and nothing came from it for \d+\.\d s: it is stopped, or too busy", text
    )
    assert time.monotonic() - begun < 40
    assert rpc.rpc_sync("worker2", pid) == stopped


def test_a_future_that_nobody_waits_for(workers: Cluster, patience: None) -> None:
    for timeout in TIMEOUTS:
        begun = time.monotonic()
        future = rpc.rpc_async("worker1", slow, (60.0,), timeout=timeout)
        ended = threading.Event()
        future.add_done_callback(lambda _, ended=ended: ended.set())
        assert ended.wait(timeout + 30)
        assert time.monotonic() - begun > 0.9 * timeout
        with pytest.raises(RpcTimeout) as caught:
            future.wait()
        if "has been running it" in str(caught.value):  # else the machine was slow, and it was not told in time
            break
    assert re.search(rf"'worker1' has been running it for {TIME}, now at .*, in slow", str(caught.value))


def test_one_that_somebody_comes_to_wait_for_while_the_worker_is_asked(workers: Cluster) -> None:
    stopped = stop("worker2")
    try:
        futures = [rpc.rpc_async("worker2", pid, timeout=0.5) for _ in range(60)]
        time.sleep(0.6)  # their time is up, and the worker has not said anything
        begun = time.monotonic()
        for future in futures:
            with pytest.raises(RpcTimeout, match=r"it is stopped, or too busy|may still be running it"):
                future.wait()
        assert time.monotonic() - begun < 10  # all of them together, not one after the other
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert rpc.rpc_sync("worker2", pid) == stopped


def test_a_worker_that_takes_no_more(workers: Cluster, patience: None) -> None:
    running = [rpc.rpc_async("worker1", until_open, timeout=150) for _ in range(MOST_RUNNING + 10)]
    wait_until(lambda: require_agent().links["worker1"].exhausted[2])
    text = text_of("worker1", pid, (), timeout=2.0)
    assert f"has not read it: {MOST_RUNNING} requests of this worker run there" in text
    rpc.rpc_sync("worker2", open_on, ("worker1",))
    for future in running:
        future.wait()
    assert "takes no more" not in text_with("has been running it", "worker1", slow, (60.0,))


class Sleeper:
    def nap(self, seconds: float) -> None:
        slow(seconds)


def test_a_method_is_named(workers: Cluster) -> None:
    sleeper = rpc.remote("worker1", Sleeper)
    sleeper.rpc_sync().nap(0.0)
    with pytest.raises(RpcTimeout, match=r"nap\(\) of <RRef .* of 'worker1': Sleeper> did not return"):
        sleeper.rpc_sync(timeout=0.5).nap(60.0)
