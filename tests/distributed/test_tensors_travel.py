"""Tensors between real processes: every dtype and layout arrives equal, and belongs to the receiver alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telegrad import rpc
from tests.cluster import Cluster

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
SMALL, LARGE = 7, 400_000  # in the frame, and beyond the size from which memory is shared


@dataclasses.dataclass
class Record:
    name: str
    tensors: dict[str, Any]


def echo(value: Any) -> Any:
    return value


def scribble(x: torch.Tensor) -> torch.Tensor:
    x.fill_(9)
    return x


_kept: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> None:
    _kept.append(x)


def kept() -> list[torch.Tensor]:
    return _kept


def forget() -> int:
    count = len(_kept)
    _kept.clear()
    return count


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, a.requires_grad, a.layout) == (
        b.dtype,
        b.shape,
        b.requires_grad,
        b.layout,
    ) and torch.equal(
        a.view(torch.uint8) if a.dtype.itemsize == 1 and a.dtype.is_floating_point else a,
        b.view(torch.uint8) if b.dtype.itemsize == 1 and b.dtype.is_floating_point else b,
    )


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(job: Cluster, dtype: torch.dtype, size: int) -> None:
    x = (torch.arange(size) % 2).to(dtype)
    assert same(rpc.rpc_sync("worker1", echo, (x,)), x)


KINDS = {
    "0-d": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "strided": lambda: torch.arange(100_000.0)[::3],
    "expanded": lambda: torch.ones(1, 3).expand(1000, 3),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(20_000)),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(job: Cluster, kind: str) -> None:
    x = KINDS[kind]()
    y = rpc.rpc_sync("worker1", echo, (x,))
    assert same(x, y)
    assert type(x) is type(y)
    assert x.is_conj() == y.is_conj()


def test_sparse_quantized_and_meta(job: Cluster) -> None:
    coo = torch.eye(5).to_sparse()
    assert torch.equal(rpc.rpc_sync("worker1", echo, (coo,)).to_dense(), coo.to_dense())
    csr = torch.eye(300).to_sparse_csr()
    back = rpc.rpc_sync("worker1", echo, (csr,))
    assert back.layout is torch.sparse_csr
    assert torch.equal(back.to_dense(), csr.to_dense())
    quantized = torch.quantize_per_tensor(torch.randn(10), 0.1, 3, torch.qint8)
    assert torch.equal(rpc.rpc_sync("worker1", echo, (quantized,)).dequantize(), quantized.dequantize())
    meta = rpc.rpc_sync("worker1", echo, (torch.empty(10**12, device="meta"),))
    assert (meta.device.type, meta.shape) == ("meta", (10**12,))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (60, 500)])
def test_quantized_per_channel(job: Cluster, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for axis in range(len(shape)):
        scales = torch.rand(shape[axis], dtype=torch.float64) / 50 + 0.01
        zero_points = torch.arange(shape[axis]) % 7
        sent = torch.quantize_per_channel(torch.randn(shape), scales, zero_points, axis, dtype)
        came = rpc.rpc_sync("worker1", echo, (sent,))
        assert came.dtype == dtype and came.qscheme() == sent.qscheme()
        assert came.q_per_channel_axis() == axis
        assert torch.equal(came.q_per_channel_scales(), scales)
        assert torch.equal(came.q_per_channel_zero_points(), zero_points)
        assert torch.equal(came.int_repr(), sent.int_repr())
        assert torch.equal(came.dequantize(), sent.dequantize())


def test_views_share_storage_again(job: Cluster) -> None:
    base = torch.arange(100_000.0)
    a, b = rpc.rpc_sync("worker1", echo, ((base, base[10:20]),))
    b.zero_()
    assert a[10:20].eq(0).all()
    assert base[11] == 11


def test_nesting(job: Cluster) -> None:
    shared = torch.ones(3)
    value = {"list": [shared, (shared, {1: torch.zeros(50_000)})], "record": Record("r", {"x": torch.eye(2)})}
    back = rpc.rpc_sync("worker1", echo, (value,))
    assert back["list"][0] is back["list"][1][0]
    assert torch.equal(back["list"][1][1][1], torch.zeros(50_000))
    assert torch.equal(back["record"].tensors["x"], torch.eye(2))


def test_numpy_and_long_bytes(job: Cluster) -> None:
    array = np.arange(100_000)
    assert np.array_equal(rpc.rpc_sync("worker1", echo, (array,)), array)
    text = b"x" * 5_000_000
    assert rpc.rpc_sync("worker1", echo, (text,)) == text


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_received_tensor_belongs_to_its_receiver(job: Cluster, size: int) -> None:
    x = torch.zeros(size)
    y = rpc.rpc_sync("worker1", scribble, (x,))
    assert x.eq(0).all()
    assert y.eq(9).all()
    rpc.rpc_sync("worker2", keep, (x,))
    (there,) = rpc.rpc_sync("worker2", kept)
    there.fill_(5)
    x.fill_(4)
    for _ in range(5):  # what is sent meanwhile must not land in memory that is still in use
        rpc.rpc_sync("worker2", echo, (torch.full((size,), 7.0),))
    assert rpc.rpc_sync("worker2", kept)[0].eq(0).all()
    assert there.eq(5).all()
    assert rpc.rpc_sync("worker2", forget) == 1


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_received_tensor_is_ordinary_whatever_the_mode_of_the_thread_that_reads(job: Cluster, size: int) -> None:
    """One made in inference mode can be in no graph. A thread in that mode reads answers of others, too."""
    with torch.inference_mode():
        of_others = [rpc.rpc_async("worker1", torch.ones, (size,)) for _ in range(20)]
        own = rpc.rpc_sync("worker1", torch.ones, (size,))
    answers = [own, *torch.futures.wait_all(of_others)]
    assert not any(answer.is_inference() for answer in answers)
    weight = torch.zeros(size, requires_grad=True)
    (weight * own).sum().backward()
    assert torch.equal(weight.grad, own)


def test_a_tensor_may_change_once_the_call_was_sent(job: Cluster) -> None:
    """As in torch, what is in an argument while `rpc_async` runs is what arrives."""
    futures = []
    x = torch.zeros(LARGE)
    for i in range(5):
        x.fill_(i)
        futures.append(rpc.rpc_async("worker1", echo, (x,)))
    for i, future in enumerate(futures):
        assert future.wait().eq(i).all()


def test_large_in_both_directions_at_once(job: Cluster) -> None:
    """Both sides write more than their sockets hold: each must go on reading."""
    x = torch.ones(2_000_000)
    futures = [rpc.rpc_async(name, echo, (x,)) for _ in range(8) for name in job.others]
    assert all(torch.equal(f.wait(), x) for f in futures)


def test_many_blocks_at_once(job: Cluster) -> None:
    x = torch.ones(20_000)
    futures = [rpc.rpc_async("worker3", echo, (x * i,)) for i in range(600)]
    assert all(f.wait()[0] == i for i, f in enumerate(futures))
