"""Cancelling a call reaches the worker: what has not begun never begins, coroutines end, functions can ask."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import CallCancelled, RpcTimeout
from telegrad.ids import RRefId
from telegrad.rpc.current import require_agent
from telegrad.rpc.server.answers import MOST_RUNNING
from telegrad.rpc.server.cancellation import Cancellations
from telegrad.wire.messages import RRefFetch
from tests.cluster import Cluster, cluster
from tests.waiting import stop_process, wait_until

_log: list[str] = []
_open = threading.Event()


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(2, heartbeat=10) as made:  # one that a test stops must not be given up meanwhile
        yield made


@pytest.fixture(autouse=True)
def fresh(pair: Cluster) -> Iterator[None]:
    rpc.rpc_sync("worker1", reset)
    yield
    rpc.rpc_sync("worker1", reset)
    wait_until(nothing_runs)


def reset() -> None:
    _open.set()
    _log.clear()
    _open.clear()


def left_over() -> tuple[int, int, int]:
    """Requests that run on this worker, and what is remembered of cancelled ones."""
    sessions = require_agent().peers.sessions()
    cancellations = [session.cancellations for session in sessions if session.cancellations is not None]
    return (
        sum(session.running for session in sessions),
        sum(len(each._asked) for each in cancellations),
        sum(len(each._stops) for each in cancellations),
    )


def nothing_runs() -> bool:
    return rpc.rpc_sync("worker1", left_over) == (1, 0, 0)  # the question itself


def log() -> list[str]:
    return list(_log)


def note(text: str) -> None:
    _log.append(text)


def ask_until_cancelled() -> str:
    _log.append("began")
    deadline = time.monotonic() + 60
    while not rpc.cancelled():
        if time.monotonic() > deadline:
            return "never"
        time.sleep(0.002)
    _log.append("saw it")
    return "stopped"


async def sleep_long() -> None:
    _log.append("began")
    try:
        await asyncio.sleep(120)
    except asyncio.CancelledError:
        _log.append("cancelled")
        raise


def block() -> None:
    _log.append("began")
    _open.wait(60)


def logged(*texts: str) -> Callable[[], bool]:
    return lambda: rpc.rpc_sync("worker1", log) == list(texts)


def test_a_function_can_ask(pair: Cluster) -> None:
    future = rpc.rpc_async("worker1", ask_until_cancelled)
    wait_until(logged("began"))
    assert future.cancel()
    with pytest.raises(CallCancelled, match=r"ask_until_cancelled\(\) on worker 'worker1' was cancelled"):
        future.wait()
    wait_until(logged("began", "saw it"))
    assert not future.cancel()
    assert not rpc.cancelled()


def test_an_interrupt_of_the_caller_is_a_cancellation(pair: Cluster) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(logged("began"))
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("worker1", ask_until_cancelled, timeout=60)
    thread.join()
    wait_until(logged("began", "saw it"))


def fetches_under_way() -> list[str]:
    return [what for what in require_agent().under_way() if "RRefFetch" in what]


def test_a_value_that_never_comes_is_no_longer_waited_for(pair: Cluster) -> None:
    """Whoever was interrupted lets go of its reference; if that is heard before the value is asked for, none comes."""
    link = require_agent().link(require_agent().find("worker1"))
    slot = link.send(RRefFetch(RRefId(1 << 40)), timeout=0.0, what="a value that nobody makes", complete=lambda _: None)
    wait_until(lambda: rpc.rpc_sync("worker1", fetches_under_way))
    assert link.cancel(slot)
    wait_until(lambda: not rpc.rpc_sync("worker1", fetches_under_way))


def test_a_coroutine_is_cancelled(pair: Cluster) -> None:
    future = rpc.rpc_async("worker1", sleep_long)
    wait_until(logged("began"))
    assert future.cancel()
    wait_until(logged("began", "cancelled"))
    with pytest.raises(CallCancelled):
        future.wait()


def test_cancelling_what_awaits_a_call(pair: Cluster) -> None:
    async def call() -> None:
        await rpc.rpc_async("worker1", sleep_long)

    async def main() -> None:
        task = asyncio.create_task(call())
        await asyncio.to_thread(wait_until, logged("began"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for timeout in (0.05, 0.5, 5.0):  # on a busy machine it may be given up before it has begun
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(rpc.rpc_async("worker1", sleep_long), timeout)
            await asyncio.to_thread(wait_until, nothing_runs)
            if rpc.rpc_sync("worker1", log).count("began") == 2:
                break

    asyncio.run(main())
    assert rpc.rpc_sync("worker1", log) == ["began", "cancelled"] * 2


def test_what_has_not_begun_never_begins(pair: Cluster) -> None:
    """The worker reads nothing while it is stopped: then each call has come together with its cancellation."""
    stopped = rpc.rpc_sync("worker1", os.getpid)
    stop_process(stopped)
    try:
        futures = [rpc.rpc_async("worker1", note, (str(n),)) for n in range(20)]
        assert all(future.cancel() for future in futures[::2])
        connection = require_agent().links["worker1"].current
        assert connection is not None
        wait_until(lambda: not connection.outbox)  # what shares a write is written
    finally:
        os.kill(stopped, signal.SIGCONT)
    for future in futures[1::2]:
        future.wait()
    assert set(rpc.rpc_sync("worker1", log)) == {str(n) for n in range(1, 20, 2)}


@rpc.functions.async_execution
def never_done() -> rpc.Future[None]:
    return rpc.Future()


@pytest.mark.parametrize("endless", [sleep_long, never_done])
def test_it_reaches_a_worker_that_reads_no_more(pair: Cluster, endless: Any) -> None:
    """So many run that it takes no more of this caller: not the calls behind them, nor word that all are cancelled."""
    futures = [rpc.rpc_async("worker1", endless, timeout=0) for _ in range(MOST_RUNNING + 100)]
    wait_until(lambda: require_agent().links["worker1"].exhausted[2])
    assert all(future.cancel() for future in futures)
    assert "never" not in rpc.rpc_sync("worker1", log, timeout=120)  # it reads on


def test_a_request_is_refused_if_its_cancellation_came_first() -> None:
    cancellations = Cancellations()
    cancellations.check(7)
    cancellations.ask(7)
    assert 7 in cancellations
    with pytest.raises(CallCancelled, match="before it began"):
        cancellations.check(7)
    cancellations.check(8)
    stopped: list[int] = []
    cancellations.on_ask(7, lambda: stopped.append(7))  # its coroutine starts after the word came
    cancellations.on_ask(8, lambda: stopped.append(8))
    assert stopped == [7]
    cancellations.ask(8)
    assert stopped == [7, 8]
    for answered in (7, 8):
        cancellations.forget(answered)
        assert answered not in cancellations


def _done_by_the_timer(timeout: float) -> None:
    future = rpc.rpc_async("worker1", sleep_long, timeout=timeout)
    wait_until(future.done)  # with no thread waiting
    future.wait()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda timeout: rpc.rpc_sync("worker1", ask_until_cancelled, timeout=timeout), ["began", "saw it"]),
        (lambda timeout: rpc.rpc_async("worker1", sleep_long, timeout=timeout).wait(), ["began", "cancelled"]),
        (_done_by_the_timer, ["began", "cancelled"]),
    ],
    ids=["function", "coroutine", "by the timer"],
)
def test_a_timeout_leaves_nothing_running(pair: Cluster, call: Callable[[float], None], said: list[str]) -> None:
    for timeout in (0.05, 0.5, 5.0):  # on a busy machine a coroutine may be given up before it has begun
        with pytest.raises(RpcTimeout):
            call(timeout)
        wait_until(nothing_runs)
        if rpc.rpc_sync("worker1", log):
            break
    assert rpc.rpc_sync("worker1", log) == said


def test_futures_that_are_no_calls(pair: Cluster) -> None:
    assert not rpc.Future().cancel()
    done = rpc.rpc_async("worker1", log)
    done.wait()
    assert not done.cancel()


def test_callbacks_run(pair: Cluster) -> None:
    future = rpc.rpc_async("worker1", sleep_long)
    seen: list[Any] = []
    future.add_done_callback(lambda f: seen.append(f.done()))
    wait_until(logged("began"))
    future.cancel()
    wait_until(lambda: seen == [True])


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


async def scaled_later(x: torch.Tensor) -> torch.Tensor:
    await sleep_long()
    return x * 3


def test_a_pass_over_a_context_with_a_cancelled_call(pair: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        cancelled = rpc.rpc_async("worker1", scaled_later, (x,))
        wait_until(logged("began"))
        assert cancelled.cancel()
        wait_until(logged("began", "cancelled"))
        y = rpc.rpc_sync("worker1", scaled, (x,))
        autograd.backward(context_id, [y.sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0]


def test_dropping_a_future_that_was_cancelled_says_nothing(pair: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    future = rpc.rpc_async("worker1", sleep_long)
    assert future.cancel()
    wait_until(future.done)
    del future
    gc.collect()
    assert not [record for record in caplog.records if "was dropped" in record.message]
