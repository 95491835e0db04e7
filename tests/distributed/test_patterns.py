"""Calls to many workers, many calls in one message, and streams: against what one process would do."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import RpcTimeout, TelegradError
from tests.cluster import Cluster, cluster
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


class Refused(Exception):
    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{number}: {why}")
        self.number = number


def name() -> str:
    return rpc.get_worker_info().name


def refuse_on(worker: str) -> str:
    if name() == worker:
        raise Refused(1, "not here")
    return name()


_gates: dict[str, threading.Event] = {}


def gate(key: str) -> threading.Event:
    return _gates.setdefault(key, threading.Event())


def pass_gate(key: str, value: int) -> int:
    assert gate(key).wait(90)
    return value


def open_gate(key: str) -> None:
    gate(key).set()


# --- many workers ---


def test_all_workers_are_listed(trio: Cluster) -> None:
    assert [(info.id, info.name) for info in rpc.get_worker_infos()] == [(n, f"worker{n}") for n in range(3)]


def test_gather(trio: Cluster) -> None:
    assert rpc.gather(name) == {f"worker{n}": f"worker{n}" for n in range(3)}
    assert rpc.gather(pow, (2,), {"exp": 3}, workers=["worker2", 1]) == {"worker2": 8, "worker1": 8}
    with pytest.raises(Refused, match="not here") as caught:
        rpc.gather(refuse_on, ("worker2",))
    assert "On worker 'worker2'" in caught.value.__notes__[-1]
    assert rpc.gather(name, workers=[]) == {}
    with pytest.raises(ValueError, match="nobody"):
        rpc.gather(name, workers=["nobody"])
    assert rpc.gather(name, workers="worker2") == {"worker2": "worker2"}


def test_map_without_workers(trio: Cluster) -> None:
    with pytest.raises(ValueError, match="`workers` is empty"):
        list(rpc.map(abs, [1], workers=[]))
    assert list(rpc.map(abs, [-1, -2], workers="worker1")) == [1, 2]


@pytest.mark.parametrize("wrong", ["3", 1.5, -1])
def test_retries_that_make_no_sense(trio: Cluster, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="retries must"):
        rpc.rpc_sync("worker1", name, retries=wrong)


def test_map_keeps_the_order_and_asks_the_others(trio: Cluster) -> None:
    assert list(rpc.map(abs, range(-50, 0))) == [abs(n) for n in range(-50, 0)]
    assert set(rpc.map(lambda _: name(), range(20))) == {"worker1", "worker2"}
    with pytest.raises(ZeroDivisionError):
        list(rpc.map(lambda n: 1 // n, [1, 0, 1]))


_mapped: list[int] = []


def slow_on_worker1(item: int) -> str:
    if name() == "worker1":
        assert gate("slow").wait(60)
    _mapped.append(item)
    return name()


def test_map_gives_a_slow_worker_fewer(trio: Cluster) -> None:
    def open_later() -> None:
        wait_until(lambda: rpc.rpc_sync("worker2", mapped) >= 36)
        rpc.rpc_sync("worker1", open_gate, ("slow",))

    opener = threading.Thread(target=open_later)
    opener.start()
    names = list(rpc.map(slow_on_worker1, range(40)))
    opener.join()
    assert names.count("worker1") <= 4 < names.count("worker2")


def mapped() -> int:
    return len(_mapped)


def test_as_completed(trio: Cluster) -> None:
    slow = rpc.rpc_async("worker1", pass_gate, ("first", 1))
    quick = rpc.rpc_async("worker2", pow, (2, 2))
    done = rpc.as_completed([slow, quick])
    assert next(done) is quick
    rpc.rpc_sync("worker1", open_gate, ("first",))
    assert next(done) is slow
    assert list(done) == []
    never = rpc.rpc_async("worker1", pass_gate, ("second", 1))
    with pytest.raises(RpcTimeout, match=r"not done after 0\.05 s: pass_gate\(\) on worker 'worker1'"):
        list(rpc.as_completed([never], timeout=0.05))
    rpc.rpc_sync("worker1", open_gate, ("second",))
    assert never.wait() == 1


# --- many calls ---


def test_a_callback_may_wait_for_what_others_answer_at_the_same_time(trio: Cluster) -> None:
    """Answers that come together are read by one thread; a callback of one that waits for the others keeps none."""
    names = [f"worker{1 + number % 2}" for number in range(6)]
    for _ in range(20):
        futures = [rpc.rpc_async(name, torch.add, args=(torch.ones(1), 1)) for name in names]
        waiting = [
            future.then(lambda _, others=futures: sum(float(each.value()) for each in _all_of(others)))
            for future in futures
        ]
        assert [future.wait() for future in waiting] == [12.0] * 6


def _all_of(futures: list[Any]) -> list[Any]:
    torch.futures.wait_all(futures)  # in C++, where no thread of ours reads
    return futures


def test_a_batch_gives_each_call_its_own_result(trio: Cluster) -> None:
    with rpc.batch() as batch:
        futures = [batch.rpc_async(f"worker{1 + n % 2}", pow, (n, 2)) for n in range(20)]
        wrong = batch.rpc_async("worker1", refuse_on, ("worker1",))
        named = batch.rpc_async("worker2", name)
        assert not futures[0].done()
    assert [future.wait() for future in futures] == [n * n for n in range(20)]
    with pytest.raises(Refused) as caught:
        wrong.wait()
    assert caught.value.number == 1
    assert "On worker 'worker1'" in caught.value.__notes__[-1]
    assert named.wait() == "worker2"
    with pytest.raises(TelegradError, match="has been sent"):
        batch.rpc_async("worker1", name)


def test_a_batch_that_is_not_sent(trio: Cluster) -> None:
    def fail_inside() -> None:
        with rpc.batch() as batch:
            futures.append(batch.rpc_async("worker1", name))
            raise KeyError

    futures: list[rpc.Future[str]] = []
    with pytest.raises(KeyError):
        fail_inside()
    with pytest.raises(TelegradError, match="not sent"):
        futures[0].wait()
    with pytest.raises(TypeError, match="async def"):
        rpc.batch().rpc_async("worker1", agenerator)


w = torch.tensor([2.0, 3.0], requires_grad=True)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * w


def test_gradients_of_a_batch_and_one_message(trio: Cluster) -> None:
    x = torch.tensor([1.0, 5.0], requires_grad=True)
    with autograd.context() as context_id:
        with rpc.batch() as batch:
            futures = [batch.rpc_async("worker1", scaled, (x * n,)) for n in range(1, 5)]
        total = torch.stack([future.wait() for future in futures]).sum()
        assert len(autograd.inspect_context(context_id)["sends"]) == 1
        autograd.backward(context_id, [total])
        assert autograd.get_gradients(context_id)[x].tolist() == [20.0, 30.0]


# --- streams ---

_produced: list[int] = []
_closed = threading.Event()


def generator(count: int) -> Iterator[int]:
    try:
        for number in range(count):
            _produced.append(number)
            yield number
    finally:
        _closed.set()


async def agenerator(count: int) -> AsyncIterator[int]:
    try:
        for number in range(count):
            await asyncio.sleep(0)
            _produced.append(number)
            yield number
    finally:
        _closed.set()


def broken() -> Iterator[int]:
    yield 1
    raise Refused(2, "midway")


def forget() -> None:
    _produced.clear()
    _closed.clear()


def progress() -> tuple[list[int], bool]:
    return list(_produced), _closed.is_set()


@pytest.fixture(params=[generator, agenerator])
def numbers(request: pytest.FixtureRequest, trio: Cluster) -> Any:
    rpc.rpc_sync("worker1", forget)
    return request.param


def test_a_stream_is_the_generator(numbers: Any) -> None:
    assert list(rpc.stream("worker1", numbers, (5,))) == [0, 1, 2, 3, 4]
    assert list(rpc.stream("worker1", numbers, (0,))) == []

    async def read() -> list[int]:
        return [n async for n in rpc.stream("worker1", numbers, (5,), ahead=3)]

    assert asyncio.run(read()) == [0, 1, 2, 3, 4]


def test_the_generator_waits_for_its_reader(numbers: Any) -> None:
    stream = rpc.stream("worker1", numbers, (1000,), ahead=3)
    assert [next(stream) for _ in range(4)] == [0, 1, 2, 3]
    wait_until(lambda: len(rpc.rpc_sync("worker1", progress)[0]) == 6)  # four were read, two more asked for
    time.sleep(0.05)  # nothing to wait for: it must not go on
    assert len(rpc.rpc_sync("worker1", progress)[0]) == 6
    assert not rpc.rpc_sync("worker1", progress)[1]
    stream.close()
    wait_until(lambda: rpc.rpc_sync("worker1", progress)[1])
    assert list(stream) == []


def test_leaving_a_loop_closes_the_generator(numbers: Any) -> None:
    async def read() -> int:
        async with rpc.stream("worker1", numbers, (1000,)) as stream:
            async for number in stream:
                if number == 3:
                    return number
        return -1

    assert asyncio.run(read()) == 3
    wait_until(lambda: rpc.rpc_sync("worker1", progress)[1])
    assert len(rpc.rpc_sync("worker1", progress)[0]) <= 6


def stuck(count: int) -> Iterator[int]:
    yield 0
    try:
        _produced.append(1)
        _closing.wait(90)
        yield 1
    finally:
        _closed.set()


async def astuck(count: int) -> AsyncIterator[int]:
    yield 0
    try:
        _produced.append(1)
        await asyncio.Event().wait()
    finally:
        _closed.set()


_closing = threading.Event()


def let_go() -> None:
    _closing.set()


def test_a_generator_is_closed_in_the_middle_of_a_step(trio: Cluster) -> None:
    """One that awaits is cancelled; one that holds a thread is closed when it yields."""
    for numbers in (astuck, stuck):
        rpc.rpc_sync("worker1", forget)
        with rpc.stream("worker1", numbers, (2,)) as stream:
            assert next(stream) == 0  # and the second has been asked for
            wait_until(lambda: rpc.rpc_sync("worker1", progress)[0] == [1])
        if numbers is stuck:
            assert not rpc.rpc_sync("worker1", progress)[1]
            rpc.rpc_sync("worker1", let_go)
        wait_until(lambda: rpc.rpc_sync("worker1", progress)[1])


def test_errors_in_a_stream(trio: Cluster) -> None:
    stream = rpc.stream("worker1", broken)
    assert next(stream) == 1
    with pytest.raises(Refused, match="midway"):
        next(stream)
    assert list(stream) == []
    with pytest.raises(Refused, match="not here"):
        list(rpc.stream("worker1", refuse_on, ("worker1",)))
    with pytest.raises(TypeError, match="iterable"):
        list(rpc.stream("worker1", abs, (1,)))
    with pytest.raises(ValueError, match="ahead"):
        rpc.stream("worker1", generator, (1,), ahead=0)


def tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for n in range(1, 4):
        yield x * w * n


def test_gradients_through_a_stream(trio: Cluster) -> None:
    x = torch.tensor([1.0, 5.0], requires_grad=True)
    with autograd.context() as context_id:
        total = torch.stack(list(rpc.stream("worker1", tensors, (x,)))).sum()
        autograd.backward(context_id, [total])
        assert autograd.get_gradients(context_id)[x].tolist() == [12.0, 18.0]


# --- a job as a block ---


def test_init_rpc_as_a_context_manager(tmp_path: Path) -> None:
    program = f"""
from telegrad import rpc
options = rpc.RpcBackendOptions(init_method={(tmp_path / "store").as_uri()!r})
with rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options) as me:
    assert rpc.rpc_sync(me, pow, (2, 3)) == 8
try:
    with rpc.init_rpc("again", rpc_backend_options=options) as me:
        raise KeyError(me.name)
except KeyError as error:
    assert error.args == ("again",)
with rpc.init_rpc("third", rpc_backend_options=options):
    rpc.shutdown()
try:
    rpc.get_worker_info()
except RuntimeError as error:
    assert "has not been initialized" in str(error)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)
