"""Every form of a call, over every way between workers: whom, what, how long."""

import asyncio
import functools
import operator
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from telegrad import autograd, rpc
from telegrad.errors import CallRefused, RpcTimeout, SerializationError, UnknownWorker
from tests.cluster import Cluster
from tests.waiting import wait_until

# --- what runs on the workers ---


def who() -> str:
    return rpc.get_worker_info().name


def add(a: int, b: int = 10, *, c: int = 100) -> int:
    return a + b + c


def nap(seconds: float) -> str:
    """Ends early when its caller has given it up, so that a test may ask for a long one."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not rpc.cancelled():
        time.sleep(0.005)
    return "awake"


def bounce(here: str, there: str, levels: int) -> int:
    return 0 if levels == 0 else 1 + rpc.rpc_sync(there, bounce, (there, here, levels - 1))


def call_back(number: int, caller: str) -> int:
    return rpc.rpc_sync(caller, operator.mul, (number, 2))


async def slowly_double(x: int) -> int:
    await asyncio.sleep(0.001)
    return 2 * x


async def ask_and_add(to: str, x: int) -> int:
    return 1 + await rpc.rpc_async(to, slowly_double, (x,))


@rpc.functions.async_execution
def chained(to: str, x: int) -> torch.futures.Future[int]:
    return rpc.rpc_async(to, operator.add, (x, 1)).then(lambda done: done.wait() + 1)


@rpc.functions.async_execution
def not_a_future() -> int:
    return 3


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def increase(self, by: int) -> int:
        self.count += by
        return self.count

    @staticmethod
    @rpc.functions.async_execution
    def static_chain(to: str, x: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, operator.add, (x, 1)).then(lambda done: done.wait() + 1)

    @classmethod
    @rpc.functions.async_execution
    def class_chain(cls, to: str, x: int) -> torch.futures.Future[str]:
        return rpc.rpc_async(to, operator.add, (x, 1)).then(lambda done: f"{cls.__name__} {done.wait()}")


_held = threading.Event()


def hold() -> bool:
    return _held.wait(150)


def let_go() -> None:
    _held.set()


# --- whom ---


def test_by_name_rank_and_info(job: Cluster) -> None:
    for rank, name in enumerate(job.names):
        info = rpc.get_worker_info(name)
        assert (info.name, info.id) == (name, rank)
        assert rpc.rpc_sync(name, who) == rpc.rpc_sync(rank, who) == rpc.rpc_sync(info, who) == name


def test_oneself(job: Cluster) -> None:
    assert rpc.get_worker_info().name == "worker0"
    assert rpc.rpc_sync("worker0", os.getpid) == os.getpid()
    assert rpc.rpc_async(rpc.get_worker_info(), operator.add, (1, 2)).wait() == 3


def test_every_worker_reaches_every_other(job: Cluster) -> None:
    for a in job.names:
        for b in job.names:
            assert rpc.rpc_sync(a, rpc.rpc_sync, (b, who)) == b


@pytest.mark.parametrize("stranger", ["nobody", 17, -1])
def test_unknown_workers(job: Cluster, stranger: str | int) -> None:
    with pytest.raises(UnknownWorker, match=rf"{stranger}.*worker0.*worker1"):
        rpc.rpc_sync(stranger, who)


def test_bad_arguments_fail_at_the_call(job: Cluster) -> None:
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_async("worker1", 3)
    with pytest.raises(TypeError, match="args"):
        rpc.rpc_sync("worker1", add, args=1)
    with pytest.raises(TypeError, match="kwargs"):
        rpc.rpc_sync("worker1", add, kwargs=[1])
    with pytest.raises(TypeError, match="timeout"):
        rpc.rpc_sync("worker1", add, timeout="soon")
    with pytest.raises(UnknownWorker, match="name, its rank or its WorkerInfo"):
        rpc.rpc_sync(1.5, add)
    with pytest.raises(SerializationError, match="lock"):
        rpc.rpc_sync("worker1", who, (threading.Lock(),))
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(TypeError, match=r"args must be a tuple or a list, got 'abc'; for one argument"):
            call("worker1", add, args="abc")
    with pytest.raises(CallRefused, match=r"exported as 'torch.add': func is text.*Pass the function itself"):
        rpc.rpc_sync("worker1", "torch.add", (1, 2))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rpc.rpc_sync("worker1", add)
    assert rpc.rpc_sync("worker1", add, (1,)) == 111


class Holder:
    def up_to(self, end: int) -> list[Iterator[int]]:
        return [counted(end)]


def counted(end: int) -> Iterator[int]:
    yield from range(end)


def counted_elsewhere(to: str) -> None:
    rpc.rpc_sync(to, counted, (3,))


def test_a_result_that_cannot_be_sent_names_its_function(job: Cluster) -> None:
    text = r"the result of counted\(\) on worker 'worker1': builtins.generator cannot be sent.*rpc\.stream gives"
    with pytest.raises(SerializationError, match=text):
        rpc.rpc_sync("worker1", counted, (3,))
    with pytest.raises(SerializationError, match=text):  # and is said once, however far it goes
        rpc.rpc_async("worker2", counted_elsewhere, ("worker1",)).wait()
    x = torch.ones(1, requires_grad=True)
    with autograd.context(), pytest.raises(SerializationError, match=text):
        rpc.rpc_sync("worker1", counted, (x,))
    with pytest.raises(
        SerializationError, match=r"the result of Holder.up_to\(\) on worker 'worker1', in its item 0: "
    ):
        rpc.rpc_sync("worker1", Holder().up_to, (3,))
    with pytest.raises(SerializationError, match=r"the result of to_here\(\) of .* on worker 'worker1': builtins.gen"):
        rpc.remote("worker1", counted, (3,)).to_here()


# --- what ---


def test_arguments(job: Cluster) -> None:
    assert rpc.rpc_sync("worker1", add, args=(1,)) == 111
    assert rpc.rpc_sync("worker1", add, args=[1, 2], kwargs={"c": 3}) == 6
    assert rpc.rpc_sync("worker1", add, kwargs={"a": 1}) == 111
    assert rpc.rpc_sync("worker1", who, (), {}) == "worker1"


def test_lambdas_closures_and_local_classes(job: Cluster) -> None:
    factor = 7

    class Scaled:
        def __init__(self, value: int) -> None:
            self.value = value

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Scaled) and other.value == self.value

        __hash__ = None

        def times(self, n: int) -> "Scaled":
            return Scaled(self.value * n)

    assert rpc.rpc_sync("worker1", lambda x: x * factor, (6,)) == 42
    assert rpc.rpc_sync("worker1", Scaled(3).times, (factor,)).value == 21
    assert rpc.rpc_sync("worker1", Scaled, (4,)).value == 4
    assert rpc.rpc_sync("worker1", functools.partial(add, 1, c=2), (3,)) == 6


def test_a_closure_is_sent_as_it_is_at_each_call(job: Cluster) -> None:
    state = {"n": 1}

    def read() -> int:
        return state["n"]

    assert rpc.rpc_sync("worker1", read) == 1
    state["n"] = 2
    assert rpc.rpc_sync("worker1", read) == 2


def test_torch_builtins_and_methods(job: Cluster) -> None:
    x = torch.arange(4.0)
    assert torch.equal(rpc.rpc_sync("worker1", torch.add, (x, x)), 2 * x)
    assert torch.equal(rpc.rpc_sync("worker1", torch.ops.aten.mul, (x, x)), x * x)
    assert torch.equal(rpc.rpc_sync("worker1", torch.ops.aten.mul.Tensor, (x, x)), x * x)
    assert torch.equal(rpc.rpc_sync("worker1", torch.nn.functional.relu, (x - 2,)), (x - 2).relu())
    assert torch.equal(rpc.rpc_sync("worker1", torch.Tensor.add, (x, 1)), x + 1)
    assert torch.equal(rpc.rpc_sync("worker1", x.sub, (1,)), x - 1)


def test_bound_methods_work_on_a_copy(job: Cluster) -> None:
    counter = Counter()
    assert rpc.rpc_sync("worker1", counter.increase, (5,)) == 5
    assert counter.count == 0


def test_coroutine_functions_are_awaited(job: Cluster) -> None:
    assert rpc.rpc_sync("worker1", slowly_double, (4,)) == 8
    assert rpc.rpc_sync("worker1", ask_and_add, ("worker2", 4)) == 9
    futures = [rpc.rpc_async("worker1", ask_and_add, ("worker0", i)) for i in range(50)]
    assert torch.futures.wait_all(futures) == [2 * i + 1 for i in range(50)]


def test_async_execution(job: Cluster) -> None:
    assert rpc.rpc_sync("worker1", chained, ("worker2", 1)) == 3
    assert rpc.rpc_sync("worker1", Counter.static_chain, ("worker0", 1)) == 3
    assert rpc.rpc_sync("worker1", Counter.class_chain, ("worker1", 1)) == "Counter 2"
    assert rpc.rpc_sync("worker1", Counter().class_chain, ("worker1", 1)) == "Counter 2"
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync("worker1", not_a_future)


def test_modules_and_optimizers_as_arguments(job: Cluster) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(5, 3, dtype=torch.float64)
    remote = rpc.rpc_sync("worker1", one_step, (model, optimizer, x))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    local = one_step(model, optimizer, x)
    assert all(torch.allclose(remote[name], value) for name, value in local.items())


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model(x).square().sum().backward()
    optimizer.step()
    return model.state_dict()


def test_a_function_is_sent_once_and_then_named(job: Cluster) -> None:
    for _ in range(3):
        assert rpc.rpc_sync("worker1", add, (1,)) == 111
    many = [rpc.rpc_async("worker1", add, (i,), {"c": 0}) for i in range(200)]
    assert [f.wait() for f in many] == [i + 10 for i in range(200)]


# --- how long ---


def test_a_call_ends_at_its_timeout(job: Cluster) -> None:
    start = time.monotonic()
    with pytest.raises(RpcTimeout, match=r"nap.*'worker1'"):
        rpc.rpc_sync("worker1", nap, (90.0,), timeout=0.05)
    future = rpc.rpc_async("worker1", nap, (90.0,), timeout=0.05)
    with pytest.raises(TimeoutError):
        future.wait()
    assert time.monotonic() - start < 60
    # The late replies are dropped, and calls that follow get their own.
    assert rpc.rpc_sync("worker1", add, (1,)) == 111
    assert rpc.rpc_sync("worker1", nap, (0.0,)) == "awake"


def test_a_timeout_of_the_future_without_a_waiter(job: Cluster) -> None:
    seen = threading.Event()
    rpc.rpc_async("worker1", nap, (90.0,), timeout=0.05).add_done_callback(lambda _: seen.set())
    assert seen.wait(60)


def test_the_default_timeout(job: Cluster) -> None:
    assert rpc.get_rpc_timeout() == 60.0
    try:
        rpc.set_rpc_timeout(0.05)
        assert rpc.get_rpc_timeout() == 0.05
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", nap, (60.0,))
        assert rpc.rpc_sync("worker1", nap, (0.1,), timeout=0) == "awake"
        assert rpc.rpc_async("worker1", nap, (0.1,), timeout=60).wait() == "awake"
    finally:
        rpc.set_rpc_timeout(60.0)


def test_timeout_zero_outlives_others(job: Cluster) -> None:
    forever = rpc.rpc_async("worker1", hold, timeout=0)
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker1", nap, (60.0,), timeout=0.02)
    rpc.rpc_sync("worker1", let_go)
    assert forever.wait() is True


def test_many_timeouts_free_their_slots(job: Cluster) -> None:
    from telegrad.rpc.current import require_agent

    agent = require_agent()
    futures = [rpc.rpc_async("worker2", nap, (60.0,), timeout=0.01) for _ in range(20)]
    for future in futures:
        with pytest.raises(RpcTimeout):
            future.wait()
    wait_until(lambda: len(agent.link(agent.find("worker2")).pending) == 0)  # nor is one left that asked after them


# --- many and deep ---


@pytest.mark.slow
def test_two_hundred_levels(job: Cluster) -> None:
    assert rpc.rpc_sync("worker1", bounce, ("worker1", "worker0", 200), timeout=150) == 200


@pytest.mark.slow
def test_five_hundred_calls_that_call_back(job: Cluster) -> None:
    futures = [rpc.rpc_async("worker1", call_back, (i, "worker0"), timeout=150) for i in range(500)]
    assert [f.wait() for f in futures] == [2 * i for i in range(500)]


@pytest.mark.slow
def test_more_blocked_calls_than_threads(job: Cluster) -> None:
    """Each waits in a way nobody announces: more of them than the I/O threads has threads."""
    futures = [rpc.rpc_async("worker3", hold, timeout=150) for _ in range(60)]
    rpc.rpc_sync("worker3", let_go, timeout=120)
    assert all(f.wait() for f in futures)


@pytest.mark.slow
def test_threads_of_one_worker_share_a_link(job: Cluster) -> None:
    results: list[int] = []

    def loop(base: int) -> None:
        for i in range(100):
            results.append(rpc.rpc_sync("worker1", operator.add, (base, i)) - base - i)

    threads = [threading.Thread(target=loop, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [0] * 800
