"""Coroutines, futures, callbacks and threads: calls made in them belong to the context of whoever started them."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from telegrad import rpc
from telegrad.errors import AutogradError
from tests.features.table import add, program, program_with
from tests.features.world import STATE, call, call_async, call_on, keep, kept, leaf, param


def doubled(x: Tensor) -> Tensor:
    return x * param("doubled", 2)


def tripled(x: Tensor) -> Tensor:
    return x * param("tripled", 2) * 3


def then(future: Any, callback: Any) -> Any:
    """`then`, which torch's own futures hand no context: those are done at once in one process."""
    return future.then(callback)


async def awaits_nothing(x: Tensor) -> Tensor:
    return call_on("worker2", doubled, x) * 3


async def awaits_first(x: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return call_on("worker2", doubled, x) * 3


async def awaits_a_call(x: Tensor) -> Tensor:
    if not STATE.distributed:
        return doubled(x) + x
    return await rpc.rpc_async("worker2", doubled, (x,)) + x


async def gathers(x: Tensor) -> Tensor:
    first, second = await asyncio.gather(awaits_first(x), awaits_nothing(x * 2))
    return first + second


async def in_a_task(x: Tensor) -> Tensor:
    return await asyncio.get_running_loop().create_task(awaits_first(x * 2))


async def in_to_thread(x: Tensor) -> Tensor:
    return await asyncio.to_thread(call_on, "worker2", doubled, x)


async def coroutine_calls_coroutine(x: Tensor) -> Tensor:
    await asyncio.sleep(0)
    if not STATE.distributed:
        return await awaits_first(x) * 2
    return await rpc.rpc_async("worker2", awaits_third, (x,)) * 2


async def awaits_third(x: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return call_on("worker3", doubled, x) * 3


@program_with(strict=True)
def a_coroutine_that_calls() -> Any:
    return call(awaits_nothing, leaf(2))


@program_with(strict=True)
def a_coroutine_that_calls_after_an_await() -> Any:
    return call(awaits_first, leaf(2))


@program_with(strict=True)
def a_coroutine_that_awaits_a_call() -> Any:
    return call(awaits_a_call, leaf(2))


@program_with(strict=True)
def a_coroutine_that_gathers() -> Any:
    return call(gathers, leaf(2))


@program_with(strict=True)
def a_coroutine_with_a_task() -> Any:
    return call(in_a_task, leaf(2))


@program_with(strict=True)
def a_coroutine_with_a_thread() -> Any:
    return call(in_to_thread, leaf(2))


@program_with(strict=True)
def coroutines_on_two_workers() -> Any:
    return call(coroutine_calls_coroutine, leaf(2))


@program_with(strict=True)
def two_coroutines_at_once() -> Any:
    x = leaf(2)
    futures = [call_async(awaits_first, x), call_async(awaits_nothing, x * 2)]
    return futures[0].wait() * futures[1].wait()


@program_with(strict=True)
def awaited_by_the_caller() -> Any:
    x = leaf(2)

    async def main() -> Tensor:
        if not STATE.distributed:
            return doubled(x) * doubled(x)
        return await rpc.rpc_async("worker1", doubled, (x,)) * await rpc.rpc_async("worker1", doubled, (x,))

    return asyncio.run(main())


@program_with(strict=True)
def a_call_in_then() -> Any:
    x = leaf(2)
    return then(call_async(doubled, x), lambda f: call(tripled, f.wait() + x)).wait()


@program_with(strict=True)
def a_chain_of_thens() -> Any:
    x = leaf(2)
    first = then(call_async(doubled, x), lambda f: call(tripled, f.wait()))
    return then(first, lambda f: call(doubled, f.value() * x)).wait()


@program_with(strict=True)
def a_call_in_a_done_callback() -> Any:
    x = leaf(2)
    done = threading.Event()

    def finish(future: Any) -> None:
        keep("result", call(tripled, future.value()))
        done.set()

    call_async(doubled, x).add_done_callback(finish)
    assert done.wait(90)
    return kept("result")


@rpc.functions.async_execution
def answers_later(x: Tensor) -> Any:
    if not STATE.distributed:
        future: Any = torch.futures.Future()
        future.set_result(doubled(x))
    else:
        future = rpc.rpc_async("worker2", doubled, (x,))
    return future.then(lambda f: call_on("worker3", tripled, f.wait() * 2))


@program_with(strict=True)
def an_async_function_that_calls_in_then() -> Any:
    return call(answers_later, leaf(2))


def with_thread(x: Tensor) -> Tensor:
    """The documented way to start a thread within a context."""
    results: list[Tensor] = []

    def run() -> None:
        results.append(call_on("worker2", doubled, x))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    thread.join()
    return results[0] + x


@program_with(strict=True)
def a_thread_of_the_called_function() -> Any:
    return call(with_thread, leaf(2))


@program_with(strict=True)
def a_thread_of_the_caller() -> Any:
    return with_thread(leaf(2))


def with_pool(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(contextvars.copy_context().run, call_on, "worker2", doubled, x * n) for n in (1, 2)]
        return parts[0].result() * parts[1].result()


@program_with(strict=True)
def a_pool_of_the_called_function() -> Any:
    return call(with_pool, leaf(2))


def with_bare_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call_on, "worker2", doubled, x).result()


def _strictly_bare_thread() -> Any:
    return call(with_bare_thread, leaf(2))


add(
    "a_bare_thread_in_a_strict_context",
    _strictly_bare_thread,
    error=AutogradError,
    text="outside any context, while the strict.*contextvars.copy_context",
    variants=("plain",),
    strict=True,
)


def many_calls(x: Tensor, depth: int) -> Tensor:
    return x if not depth else call_on(f"worker{1 + depth % 3}", many_calls, x * 1.1, depth - 1)


@program
def calls_in_calls_in_calls() -> Any:
    return call(many_calls, leaf(2), 7)


@program
def forty_calls_in_flight() -> Any:
    x = leaf(2)
    return sum(future.wait() for future in [call_async(doubled, x * n) for n in range(40)])


@program
def a_result_used_by_the_next_call() -> Any:
    y = leaf(2)
    for _ in range(6):
        y = call(doubled, y).tanh()
    return y


def put_aside(x: Tensor) -> None:
    keep("aside", x * 2)


def take_up(x: Tensor) -> Tensor:
    return kept("aside") * x


@program
def a_value_kept_on_the_worker() -> Any:
    x = leaf(2)
    call(put_aside, x)
    return call(take_up, x) + call(take_up, x * 3)


@program
def a_branch_on_data() -> Any:
    x = leaf(2)
    return call(doubled, x) if x.sum() > 0 else call(tripled, x)


@program
def a_loop_on_data() -> Any:
    y = leaf(2)
    while y.norm() < 40:
        y = call(tripled, y).abs() + y
    return y


@program
def an_error_caught_between() -> Any:
    x = leaf(2)
    try:
        call(fails, x)
    except ZeroDivisionError:
        pass
    return call(doubled, x)


def fails(x: Tensor) -> None:
    doubled(x)
    raise ZeroDivisionError


@program
def an_error_caught_there() -> Any:
    return call(catches, leaf(2))


def catches(x: Tensor) -> Tensor:
    try:
        call_on("worker2", fails, x)
    except ZeroDivisionError:
        return tripled(x)
    raise AssertionError
