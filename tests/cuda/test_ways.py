"""The ways of a tensor between two workers on one GPU: read where it lies, written to where it stays, or by a block.

What each way must not do is tried with long kernels: be read too late, be written too early, change what is in use.
"""

import gc
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from telegrad import rpc
from telegrad.cuda.runtime import Runtime
from telegrad.errors import RpcTimeout
from telegrad.rpc.current import require_agent
from telegrad.transport.device import channel as channels
from tests.cluster import Cluster, cluster
from tests.cuda.helpers import LONG, add, channel_to, echo, warm
from tests.waiting import wait_until

SIZE = 2**18


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two workers that may do without blocks."""
    with cluster(2, cuda_direct=True) as made:
        yield made


@pytest.fixture(autouse=True)
def ready(pair: Cluster) -> None:
    warm()
    warm("worker0")


def ways_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes which way each message of this worker goes."""
    ways: list[str] = []
    for name in ("_leave", "_leave_one", "_write", "_write_one", "_copy"):
        way = getattr(channels.DeviceChannel, name)

        def noted(*args: object, way: object = way, name: str = name.removesuffix("_one")) -> object:
            result = way(*args)  # type: ignore[operator] # a method
            if result is not None:
                ways.append(name)
            return result

        monkeypatch.setattr(channels.DeviceChannel, name, noted)
    return ways


def test_a_call_from_an_idle_stream_asks_nothing_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")
    for _ in range(4):
        rpc.rpc_sync("worker1", add, args=(x, y))
    torch.cuda.synchronize()
    asked: list[str] = []
    for name in ("copy", "launch", "wait_value", "write_value"):
        monkeypatch.setattr(Runtime, name, lambda *_, name=name: asked.append(name))
    for _ in range(5):
        result = rpc.rpc_sync("worker1", add, args=(x, y))
    assert not asked
    assert result.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_each_way_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ways_of(monkeypatch)
    x = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    rpc.rpc_sync("worker1", echo, args=(x,))
    assert ways == ["_leave"]
    for _ in range(3):  # through a block, and once the peer has granted memory for the next one, there
        rpc.rpc_async("worker1", echo, args=(x,)).wait()
    assert ways[1] == "_copy" and ways[-1] == "_write", ways
    torch.cuda._sleep(LONG)
    rpc.rpc_sync("worker1", echo, args=(x,))
    assert ways[-1] == "_write", "the stream was at work"


def test_a_received_tensor_is_an_ordinary_one() -> None:
    x = torch.rand(1000, device="cuda")
    for _ in range(3):
        came = rpc.rpc_sync("worker1", echo, args=(x,))
    assert came.untyped_storage().nbytes() == 4000
    # Not by the memory that is allocated: the timer may have memory granted for the next one at this very moment.
    storage = StorageWeakRef(came.untyped_storage())
    del came
    gc.collect()
    assert storage.expired(), "somebody else holds it"
    kept = [rpc.rpc_sync("worker1", echo, args=(torch.full((1000,), float(i), device="cuda"),)) for i in range(20)]
    assert [one.unique().tolist() for one in kept] == [[float(i)] for i in range(20)]
    assert len({one.data_ptr() for one in kept}) == 20


def test_forms_that_change_from_call_to_call() -> None:
    for form in ((100,), (10, 10), (25, 2, 2), (100,)):
        for dtype in (torch.float32, torch.int32, torch.float32):
            sent = torch.arange(100, device="cuda").to(dtype).reshape(form)
            came = rpc.rpc_sync("worker1", echo, args=(sent,))
            assert came.dtype == dtype and torch.equal(came, sent)
    matrix = torch.rand(50, 70, device="cuda")
    for sent in (matrix, matrix.t(), matrix, matrix.t()):
        came = rpc.rpc_sync("worker1", echo, args=(sent,))
        assert came.stride() == sent.stride() and torch.equal(came, sent)
    with torch.inference_mode():
        rpc.rpc_sync("worker1", echo, args=(matrix,))
    came = rpc.rpc_sync("worker1", echo, args=(matrix,))
    assert not came.is_inference()


def test_memory_of_what_was_let_go_of_is_written_only_after_its_last_use() -> None:
    """Results are let go of while a long kernel still reads them: what comes next has other memory, or waits."""
    sent = [torch.full((SIZE,), float(value), device="cuda") for value in range(12)]
    total = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    for x in sent:
        came = rpc.rpc_sync("worker1", echo, args=(x,))
        torch.cuda._sleep(LONG // 10)
        total += came
        del came
    assert total.unique().tolist() == [float(sum(range(12)))]


def test_results_nobody_looks_at_do_no_harm() -> None:
    x = torch.ones(SIZE, device="cuda")
    for _ in range(10):
        rpc.rpc_sync("worker1", slowly, args=(x,))  # let go of before the GPU has made it
        mine = torch.full((SIZE,), 5.0, device="cuda")
        torch.cuda.synchronize()
        assert mine.unique().tolist() == [5.0]


def slowly(x: Tensor) -> Tensor:
    torch.cuda._sleep(LONG // 10)
    return x + 1


def keep_busy() -> None:
    torch.cuda._sleep(3 * LONG)


def total_of(x: Tensor) -> Tensor:
    return x.sum()


def test_the_caller_may_change_what_was_read_in_place() -> None:
    """The callee's stream has much before the reading, and answers at once: the caller's stream waits."""
    for value in range(5):
        x = torch.full((SIZE,), float(value), device="cuda")
        torch.cuda.synchronize()
        rpc.rpc_sync("worker1", keep_busy)
        total = rpc.rpc_sync("worker1", total_of, args=(x,))
        x.fill_(-100)
        assert total.item() == value * SIZE


_arguments: list[Tensor] = []


def change_argument() -> None:
    _arguments[0].fill_(-100)


def calls_back(x: Tensor) -> Tensor:
    rpc.rpc_sync("worker0", change_argument)
    return x * 1


def test_who_is_called_from_there_may_change_it_too() -> None:
    for value in range(5):
        x = torch.full((SIZE,), float(value), device="cuda")
        _arguments[:] = [x]
        torch.cuda.synchronize()
        rpc.rpc_sync("worker1", keep_busy)
        assert rpc.rpc_sync("worker1", calls_back, args=(x,)).unique().tolist() == [float(value)]
        assert x.unique().tolist() == [-100.0]


_seen: list[Tensor] = []


def occupy(seconds: float) -> None:
    time.sleep(seconds)


def remember(x: Tensor) -> None:
    _seen.append(x)


def remembered() -> list[list[float]]:
    return [x.unique().tolist() for x in _seen]


def test_a_call_given_up_before_it_began_reads_nothing_wrong() -> None:
    """All threads of the worker are taken; the caller's time is up, and it changes its tensor."""
    busy = [rpc.rpc_async("worker1", occupy, args=(1.5,)) for _ in range(40)]
    x = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker1", remember, args=(x,), timeout=0.3)
    x.fill_(-100)
    torch.cuda.synchronize()
    assert x.unique().tolist() == [-100.0], "the stream waits for a call that never began"
    for future in busy:
        future.wait()
    assert rpc.rpc_sync("worker1", remembered) in ([], [[1.0]])


def test_torch_may_free_what_a_peer_has_open() -> None:
    free = torch.cuda.mem_get_info()[0]
    for value in range(6):
        x = torch.full((2**26,), float(value), device="cuda")  # 256 MB, an allocation of its own
        torch.cuda.synchronize()
        came = rpc.rpc_sync("worker1", echo, args=(x,))
        assert came[:: 2**16].unique().tolist() == [float(value)]
        del x, came
        gc.collect()
        torch.cuda.empty_cache()

    def is_free_again() -> bool:
        rpc.rpc_sync("worker1", tidy)
        tidy()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] > free - 64 * 2**20

    wait_until(is_free_again, seconds=30)


def tidy() -> None:
    agent = require_agent()
    for end in (*agent.peers.links(), *agent.peers.sessions()):
        end.tidy(time.monotonic())
    torch.cuda.empty_cache()


def test_what_is_granted_and_not_used_goes_back() -> None:
    x = torch.rand(2**20, device="cuda")
    rpc.rpc_sync("worker1", echo, args=(x,))
    rpc.rpc_sync("worker1", echo, args=(x,))
    assert channel_to("worker1").landing.granted[0] > 0
    assert "has granted worker1 device memory" in rpc.debug_waits()

    def is_back() -> bool:
        tidy()
        rpc.rpc_sync("worker1", tidy)
        return channel_to("worker1").landing.granted == (0, 0)

    wait_until(is_back, seconds=20)
    assert torch.equal(rpc.rpc_sync("worker1", echo, args=(x,)), x)
