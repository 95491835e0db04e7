"""Every way of calling sees CUDA tensors in the order of the program: coroutines, futures, streams, batches, methods.

As in `test_order.py` a long kernel stands where a missing wait would let somebody read too early.
"""

from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from tests.cluster import Cluster, cluster
from tests.cuda.helpers import LONG, SIZE, echo, plus_one_slowly, slow, warm


@pytest.fixture(scope="module", params=[False, True], ids=["blocks", "direct"])
def pair(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(2, cuda_direct=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def ready(pair: Cluster) -> None:
    warm()
    warm("worker0")


# --- coroutines and futures ---


async def double(x: Tensor) -> Tensor:
    return x * 2


async def double_slowly(x: Tensor) -> Tensor:
    torch.cuda._sleep(LONG)
    return x * 2


async def ask_and_double(to: str, x: Tensor) -> Tensor:
    return (await rpc.rpc_async(to, plus_one_slowly, args=(x,))) * 2


def test_a_coroutine_sees_what_the_caller_had_enqueued() -> None:
    for value in range(5):
        came = rpc.rpc_sync("worker1", double, args=(slow(float(value)),))
        assert came.unique().tolist() == [2.0 * value]


def test_the_caller_sees_what_a_coroutine_had_enqueued() -> None:
    for value in range(3):
        x = torch.full((SIZE,), float(value), device="cuda")
        assert rpc.rpc_sync("worker1", double_slowly, args=(x,)).unique().tolist() == [2.0 * value]


def test_a_coroutine_that_awaits_a_call() -> None:
    for value in range(3):
        came = rpc.rpc_sync("worker1", ask_and_double, args=("worker0", slow(float(value))))
        assert came.unique().tolist() == [2.0 * (value + 1)]


def test_coroutines_side_by_side() -> None:
    sent = [torch.full((SIZE,), float(value), device="cuda") for value in range(8)]
    futures = [rpc.rpc_async("worker1", ask_and_double, args=("worker0", x)) for x in sent]
    assert [future.wait().unique().tolist() for future in futures] == [[2.0 * (value + 1)] for value in range(8)]


@rpc.functions.async_execution
def chained(to: str, x: Tensor) -> torch.futures.Future[Tensor]:
    return rpc.rpc_async(to, plus_one_slowly, args=(x,)).then(lambda done: done.wait() * 3)


def test_a_function_that_returns_a_future() -> None:
    for value in range(3):
        came = rpc.rpc_sync("worker1", chained, args=("worker0", slow(float(value))))
        assert came.unique().tolist() == [3.0 * (value + 1)]


# --- streams and batches ---


def steps(x: Tensor, count: int) -> Iterator[Tensor]:
    for _ in range(count):
        torch.cuda._sleep(LONG // 4)
        x = x + 1
        yield x


async def steps_in_turn(x: Tensor, count: int) -> AsyncIterator[Tensor]:
    for _ in range(count):
        torch.cuda._sleep(LONG // 4)
        x = x + 1
        yield x


@pytest.mark.parametrize("generator", [steps, steps_in_turn])
def test_what_a_generator_yields(generator: object) -> None:
    values = rpc.stream("worker1", generator, args=(slow(10.0), 4))  # type: ignore[arg-type] # either of them
    assert [value.unique().tolist() for value in values] == [[11.0], [12.0], [13.0], [14.0]]


def test_a_batch() -> None:
    x = slow(1.0)
    with rpc.batch() as batch:
        futures = [batch.rpc_async("worker1", plus_one_slowly, args=(x + i,)) for i in range(3)]
        small = batch.rpc_async("worker1", echo, args=(torch.ones(2, device="cuda"),))
    assert [future.wait().unique().tolist() for future in futures] == [[2.0], [3.0], [4.0]]
    assert small.wait().tolist() == [1.0, 1.0]


# --- methods of what lives on the other worker ---


class Sum:
    """Adds up what it is given, slowly."""

    def __init__(self) -> None:
        self.total = torch.zeros(SIZE, device="cuda")

    def add(self, x: Tensor) -> None:
        torch.cuda._sleep(LONG // 4)
        self.total = self.total + x

    def read(self) -> Tensor:
        return self.total * 1


def test_methods_see_each_others_work() -> None:
    there = rpc.remote("worker1", Sum)
    for value in range(4):
        there.rpc_sync().add(torch.full((SIZE,), float(value), device="cuda"))
    assert there.rpc_sync().read().unique().tolist() == [6.0]
    assert there.remote().read().to_here().unique().tolist() == [6.0]


# --- memory ---


def test_memory_of_a_result_that_another_stream_reads_last() -> None:
    """A value is taken on one stream after another, and let go of while a long kernel on the last one reads it."""
    other = torch.cuda.Stream()
    found = []
    for value in range(6):
        future = rpc.rpc_async("worker1", echo, args=(torch.full((SIZE,), float(value), device="cuda"),))
        future.wait()
        with torch.cuda.stream(other):
            torch.cuda._sleep(LONG // 2)
            found.append(future.wait() * 1)
        del future
        for _ in range(3):
            rpc.rpc_sync("worker1", echo, args=(torch.full((SIZE,), -1.0, device="cuda"),))
    other.synchronize()
    assert [value.unique().tolist() for value in found] == [[float(value)] for value in range(6)]
