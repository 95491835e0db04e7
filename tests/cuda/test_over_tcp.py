"""CUDA tensors over TCP: they go to the GPU while their message is still coming, and nobody sees that but the clock."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.cuda import upload
from telegrad.cuda.upload import Upload
from telegrad.transport.device.blocks import budget
from tests.cluster import Cluster, cluster
from tests.cuda.helpers import LONG, echo
from tests.waiting import wait_until

SIZE = 4 * 2**20  # elements; 16 MB


@pytest.fixture(scope="module", params=[1, 4], ids=["one connection", "four connections"])
def job(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(2, transports=("tcp",), tcp_connections=request.param) as made:
        for _ in range(4):  # memory to receive in is pinned, and there are all connections
            rpc.rpc_sync("worker1", echo, args=(torch.ones(SIZE, device="cuda"),))
        yield made


def plus_one_slowly(x: Tensor) -> Tensor:
    torch.cuda._sleep(LONG)
    return x + 1


def test_they_go_up_as_they_come(job: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    copy = Upload._copy

    def noted(going: Upload, ranges: Sequence[tuple[int, int]]) -> None:
        steps.append(sum(stop - start for start, stop in ranges))
        copy(going, ranges)

    monkeypatch.setattr(Upload, "_copy", noted)
    most = 0
    for _ in range(10):
        steps.clear()
        sent = torch.rand(SIZE, device="cuda")
        assert torch.equal(rpc.rpc_sync("worker1", echo, args=(sent,)), sent)
        assert sum(steps) in (0, sent.nbytes), "the first message of a size goes up as a whole"
        most = max(most, len(steps))
    assert most > 1


def test_memory_that_the_gpu_has_yet_to_read_is_not_received_in(job: Cluster) -> None:
    """Results go up behind a long kernel, and the next ones come before it has ended."""
    sent = [torch.rand(SIZE, device="cuda") for _ in range(5)]
    streams = [torch.cuda.Stream() for _ in sent]
    for _ in range(3):  # the memory is pinned in the first rounds
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * LONG)
        came = []
        for x, stream in zip(sent, streams, strict=True):
            with torch.cuda.stream(stream):
                came.append(rpc.rpc_sync("worker1", echo, args=(x,)))
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(came, sent, strict=True))
    upload.collect()
    assert not upload._kept


def test_many_sizes_and_places_in_one_message(job: Cluster) -> None:
    for count in (1, 3, 5):
        sent = [torch.rand(2**18 + i * 2**17 + i, device="cpu" if i % 3 == 1 else "cuda") for i in range(count)]
        sent += [torch.rand(3, device="cuda"), torch.rand(700, 900, device="cuda").t()]
        for _ in range(3):
            came = rpc.rpc_sync("worker1", echo, args=(sent,))
            assert [x.device for x in came] == [x.device for x in sent]
            assert all(torch.equal(x, y) for x, y in zip(came, sent, strict=True))


def test_what_was_enqueued_is_seen_on_either_side(job: Cluster) -> None:
    for value in range(3):
        x = torch.zeros(SIZE, device="cuda")
        torch.cuda._sleep(LONG)
        x += value
        came = rpc.rpc_sync("worker1", plus_one_slowly, args=(x,))
        assert came.unique().tolist() == [value + 1.0]


def test_memory_of_a_result_is_written_only_after_its_last_use(job: Cluster) -> None:
    """Results are let go of while a long kernel still reads them, on the stream that took them and on another."""
    total = torch.zeros(SIZE, device="cuda")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for value in range(8):
        with torch.cuda.stream(other if value % 2 else torch.cuda.current_stream()):
            came = rpc.rpc_sync("worker1", echo, args=(torch.full((SIZE,), float(value), device="cuda"),))
            torch.cuda._sleep(LONG // 4)
            twice = came * 2
            del came
        torch.cuda.current_stream().wait_stream(other)
        total += twice
        twice.record_stream(torch.cuda.current_stream())
    assert total.unique().tolist() == [2.0 * sum(range(8))]


_kept: list[Tensor] = []


def keep(x: Tensor) -> None:
    _kept[:] = [x]


def replace_by_its_sum_slowly() -> None:
    torch.cuda._sleep(LONG)
    _kept[:] = [_kept[0].sum()]


def read_kept() -> Tensor:
    return _kept[0] * 1


def test_what_a_request_left_is_not_overwritten_while_the_next_one_reads_it(job: Cluster) -> None:
    """The tensor that one request left is let go of by the next, which is answered while its kernels still run. What
    comes then may have its memory, but not yet."""
    for value in range(5):
        rpc.rpc_sync("worker1", keep, args=(torch.full((SIZE,), float(value), device="cuda"),))
        rpc.rpc_sync("worker1", replace_by_its_sum_slowly)
        for _ in range(2):
            rpc.rpc_sync("worker1", echo, args=(torch.full((SIZE,), -1.0, device="cuda"),))
        assert rpc.rpc_sync("worker1", read_kept).item() == value * SIZE


def test_gradients(job: Cluster) -> None:
    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    for _ in range(3):
        with autograd.context() as context_id:
            there = rpc.rpc_sync("worker1", plus_one_slowly, args=(x * 3,))
            autograd.backward(context_id, [(there * 2).sum()])
            assert autograd.get_gradients(context_id)[x].unique().tolist() == [6.0]


def test_calls_side_by_side(job: Cluster) -> None:
    sent = [torch.full((SIZE // 2 + i,), float(i), device="cuda") for i in range(12)]
    for _ in range(3):
        futures = [rpc.rpc_async("worker1", echo, args=(x,)) for x in sent]
        assert all(torch.equal(future.wait(), x) for future, x in zip(futures, sent, strict=True))


def taken() -> int:
    return budget.taken(0)


def test_nothing_is_counted_as_waiting_afterwards(job: Cluster) -> None:
    wait_until(lambda: taken() == 0 and rpc.rpc_sync("worker1", taken) == 0, seconds=20)
