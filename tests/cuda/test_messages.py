"""CUDA tensors arrive equal, on the GPU they are meant for, and do not pass through the host on their way."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from tests.cluster import WAYS, Cluster, cluster
from tests.cuda.helpers import echo

SIZES = [1, 1000, 2**18, 2**22, 2**25 + 3]


@pytest.fixture(scope="module", params=WAYS)
def job(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(2, **WAYS[request.param]) as made:
        yield made


@pytest.mark.parametrize("size", SIZES)
def test_an_echo_is_equal_and_on_the_gpu(job: Cluster, size: int) -> None:
    for _ in range(3):
        sent = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        came = rpc.rpc_sync("worker1", echo, args=(sent,))
        assert came.device == sent.device
        assert torch.equal(came, sent)


TENSORS = {
    "a scalar": lambda: torch.tensor(3.5, device="cuda"),
    "no element": lambda: torch.empty(0, 3, device="cuda"),
    "transposed": lambda: torch.rand(50, 70, device="cuda").t(),
    "a column": lambda: torch.rand(200, 100, device="cuda")[:, 3],
    "expanded": lambda: torch.rand(1, 5, device="cuda").expand(4, 5),
    "a slice": lambda: torch.rand(1000, device="cuda")[10:20],
    "bfloat16": lambda: torch.rand(33, device="cuda", dtype=torch.bfloat16),
    "float8": lambda: torch.rand(33, device="cuda").to(torch.float8_e4m3fn),
    "bool": lambda: torch.rand(33, device="cuda") > 0.5,
    "conjugated": lambda: torch.rand(33, device="cuda", dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(20, device="cuda").to_sparse(),
    "csr": lambda: torch.eye(20, device="cuda").to_sparse_csr(),
    "a parameter": lambda: torch.nn.Parameter(torch.rand(3, 3, device="cuda")),
}


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.resolve_conj().to(torch.float32) if tensor.dtype == torch.float8_e4m3fn else tensor.resolve_conj()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_any_form(job: Cluster, name: str) -> None:
    sent = TENSORS[name]()
    came = rpc.rpc_sync("worker1", echo, args=(sent,))
    assert (came.shape, came.dtype, came.device, came.layout) == (sent.shape, sent.dtype, sent.device, sent.layout)
    assert torch.equal(_plain(came), _plain(sent))
    assert came.requires_grad == sent.requires_grad


def test_tensors_that_share_memory_share_it_again(job: Cluster) -> None:
    base = torch.arange(10.0, device="cuda")
    whole, part, other = rpc.rpc_sync("worker1", echo, args=((base, base[2:5], torch.ones(3, device="cuda")),))
    part.fill_(-1)
    assert whole.tolist() == [0, 1, -1, -1, -1, 5, 6, 7, 8, 9]
    assert other.tolist() == [1, 1, 1]


def test_host_and_device_memory_in_one_message(job: Cluster) -> None:
    sent = {
        "host": torch.rand(100_000),
        "device": torch.rand(100_000, device="cuda"),
        "number": 3,
        "few": torch.ones(2),
    }
    came: Any = rpc.rpc_sync("worker1", echo, args=(sent,))
    assert came["host"].device.type == "cpu" and came["device"].device.type == "cuda" and came["number"] == 3
    assert all(torch.equal(came[key], sent[key]) for key in ("host", "device", "few"))
