"""Work on the GPU is seen in the order of the program, though no thread waits for it.

Each test puts a long kernel where a missing wait would let somebody read too early, or write too early.
"""

import threading
import time

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.engine import spare_ones
from tests.cluster import Cluster
from tests.cuda.helpers import LONG, SIZE, add, echo, plus_one_slowly, slow, warm


@pytest.fixture(autouse=True)
def ready(pair: Cluster) -> None:
    warm()
    warm("worker0")


def test_the_callee_sees_what_the_caller_had_enqueued() -> None:
    x = slow(3)
    began = time.monotonic()
    future = rpc.rpc_async("worker1", add, args=(x, x))
    assert time.monotonic() - began < 0.05, "the caller waited for the GPU"
    assert future.wait().unique().tolist() == [6.0]


def test_the_caller_sees_what_the_callee_had_enqueued() -> None:
    came = rpc.rpc_sync("worker1", plus_one_slowly, args=(torch.ones(SIZE, device="cuda"),))
    assert came.unique().tolist() == [2.0]


def test_no_cpu_waits_for_the_gpu() -> None:
    x = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    began = time.monotonic()
    came = rpc.rpc_sync("worker1", plus_one_slowly, args=(x,))
    assert time.monotonic() - began < 0.05, "the reply waited for the GPU"
    assert came.unique().tolist() == [2.0]


def test_the_sender_may_change_its_tensor_at_once() -> None:
    stream = torch.cuda.Stream()
    for value in range(10):
        with torch.cuda.stream(stream):
            x = torch.full((SIZE,), float(value), device="cuda")
            future = rpc.rpc_async("worker1", plus_one_slowly, args=(x,))
            x.fill_(-100)
            del x
            junk = torch.full((SIZE,), -200.0, device="cuda")
        assert future.wait().unique().tolist() == [value + 1.0]
        del junk


def test_a_block_is_not_written_before_it_was_read() -> None:
    sent = [torch.full((SIZE,), float(value), device="cuda") for value in range(12)]
    futures = [rpc.rpc_async("worker1", plus_one_slowly, args=(x,)) for x in sent]
    assert [future.wait().unique().tolist() for future in futures] == [[value + 1.0] for value in range(12)]


def test_a_call_on_a_stream_of_ones_own() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = slow(2)
        came = rpc.rpc_sync("worker1", plus_one_slowly, args=(x,))
        doubled = came * 2
    stream.synchronize()
    assert doubled.unique().tolist() == [6.0]


def test_a_future_waited_for_on_another_stream() -> None:
    future = rpc.rpc_async("worker1", plus_one_slowly, args=(torch.ones(SIZE, device="cuda"),))
    other = torch.cuda.Stream()
    while not future.done():
        time.sleep(0.001)
    with torch.cuda.stream(other):
        doubled = future.wait() * 2
    other.synchronize()
    assert doubled.unique().tolist() == [4.0]


def test_a_callback_sees_the_value() -> None:
    future = rpc.rpc_async("worker1", plus_one_slowly, args=(torch.ones(SIZE, device="cuda"),))
    child = future.then(lambda done: done.wait() * 3)
    assert child.wait().unique().tolist() == [6.0]


_kept: list[Tensor] = []


def keep_slowly(value: float) -> None:
    """Leave a value that takes long, and answer without any tensor."""
    _kept[:] = [slow(value)]


def read_kept() -> Tensor:
    return _kept[0] * 1


def test_the_next_request_sees_what_the_last_one_left() -> None:
    for value in range(5):
        rpc.rpc_sync("worker1", keep_slowly, args=(float(value),))
        assert rpc.rpc_sync("worker1", read_kept).unique().tolist() == [value]


def test_a_reference_here_and_there() -> None:
    there = rpc.remote("worker1", slow, args=(5.0,))
    assert there.to_here().unique().tolist() == [5.0]
    here = rpc.remote("worker0", slow, args=(6.0,))
    assert (here.local_value() * 1).unique().tolist() == [6.0]
    assert (here.to_here() * 1).unique().tolist() == [6.0]


def test_requests_of_one_worker_overlap_on_the_gpu() -> None:
    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        futures = [
            rpc.rpc_async("worker1", plus_one_slowly, args=(torch.ones(4, device="cuda"),)) for _ in range(count)
        ]
        for future in futures:
            future.wait()
        torch.cuda.synchronize()
        return time.monotonic() - began

    seconds(4)
    one = min(seconds(1) for _ in range(3))
    four = min(seconds(4) for _ in range(3))
    assert four < 2.5 * one, f"one takes {one:.3f} s, four at a time {four:.3f} s"


class _SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        torch.cuda._sleep(LONG)
        return gradient * 3


def slow_gradient(x: Tensor) -> Tensor:
    return _SlowGradient.apply(x) * 2


@pytest.mark.parametrize("size", [4, SIZE], ids=["small", "large"])
def test_gradients_wait_for_what_makes_them(size: int) -> None:
    """The gradient of a Recv is made by a slow kernel, on the peer and here."""
    for _ in range(3):
        x = torch.ones(size, device="cuda", requires_grad=True)
        y = torch.ones(size, device="cuda", requires_grad=True)
        with autograd.context() as context_id:
            there = rpc.rpc_sync("worker1", slow_gradient, args=(slow_gradient(x) + y,))
            autograd.backward(context_id, [slow_gradient(there).sum()])
            gradients = autograd.get_gradients(context_id)
            assert gradients[y].unique().tolist() == [36.0]
            assert gradients[x].unique().tolist() == [216.0]


def test_gradients_on_streams_of_ones_own() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(SIZE, device="cuda", requires_grad=True)
        with autograd.context() as context_id:
            there = rpc.rpc_sync("worker1", slow_gradient, args=(x,))
            autograd.backward(context_id, [slow_gradient(there).sum()])
            total = autograd.get_gradients(context_id)[x] * 1
    stream.synchronize()
    assert total.unique().tolist() == [36.0]


def test_many_threads_and_streams() -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(10):
                x = torch.full((SIZE // 4,), float(number * 100 + step), device="cuda", requires_grad=True)
                with autograd.context() as context_id:
                    y = rpc.rpc_sync("worker1", add, args=(x, x))
                    autograd.backward(context_id, [(y * number).sum()])
                    gradient = autograd.get_gradients(context_id)[x].unique().tolist()
                if gradient != [2.0 * number] or y.unique().tolist() != [2.0 * (number * 100 + step)]:
                    wrong.append((number, step, gradient))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_echo_through_a_chain_of_streams() -> None:
    x = slow(1)
    for _ in range(5):
        x = rpc.rpc_sync("worker1", echo, args=(x + 1,))
    assert x.unique().tolist() == [6.0]


def _gradient_of_five(x: Tensor) -> list[float]:
    """The gradient of one pass, whose loss has a hook that changes what the pass starts from."""
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", add, args=(x, x)).sum()
        assert loss.dim() == 0
        loss.register_hook(lambda gradient: gradient.mul_(5))
        autograd.backward(context_id, [loss])
        return autograd.get_gradients(context_id)[x].unique().tolist()


def test_each_pass_starts_from_a_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    _gradient_of_five(x)
    assert spare_ones._local.spare is not None
    made = spare_ones.torch.ones_like
    launched: list[object] = []
    monkeypatch.setattr(torch, "ones_like", lambda *given, **named: (launched.append(given), made(*given, **named))[1])
    assert [_gradient_of_five(x) for _ in range(4)] == [[10.0]] * 4
    assert not launched, "none was made while others waited for it"


def test_a_one_made_behind_a_long_kernel_is_used_on_its_stream_alone() -> None:
    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            assert _gradient_of_five(x) == [10.0]
            torch.cuda._sleep(LONG)  # in front of what the next pass leaves
        assert _gradient_of_five(x) == [10.0]


def test_a_leaf_that_nobody_observes_has_a_gradient_that_took_long() -> None:
    """It is kept without the engine, on whichever streams it came."""
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x = torch.ones(SIZE, device="cuda", requires_grad=True)
            with autograd.context() as context_id:
                autograd.backward(context_id, [rpc.rpc_sync("worker1", slow_gradient, args=(x,)).sum()])
                total = autograd.get_gradients(context_id)[x] * 1
        stream.synchronize()
        assert total.unique().tolist() == [6.0]


def test_the_sum_of_two_passes_over_a_leaf_that_nobody_observes() -> None:
    """The second adds what took long to what took long, on streams of its own."""
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(SIZE, device="cuda", requires_grad=True)
        with autograd.context() as context_id:
            for _ in range(2):
                autograd.backward(context_id, [rpc.rpc_sync("worker1", slow_gradient, args=(x,)).sum()])
            total = autograd.get_gradients(context_id)[x] * 1
        torch.cuda.current_stream().synchronize()
    assert total.unique().tolist() == [12.0]
