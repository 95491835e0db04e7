"""Between two workers on one GPU: device memory, blocks that are used again, and no map needed."""

import pytest
import torch

from telegrad import rpc
from telegrad.cuda import host
from tests.cluster import Cluster
from tests.cuda.helpers import add, channel_to, device_of, echo, warm


def test_what_was_received_is_the_receivers_own(pair: Cluster) -> None:
    warm()
    first = rpc.rpc_sync("worker1", echo, args=(torch.full((1000,), 1.0, device="cuda"),))
    for value in range(2, 20):
        rpc.rpc_sync("worker1", echo, args=(torch.full((1000,), float(value), device="cuda"),))
    assert first.unique().tolist() == [1.0]
    assert first.untyped_storage().nbytes() == 4000


def test_the_host_sees_none_of_it(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    warm()

    def refuse(*_: object) -> None:
        raise AssertionError("through the host")

    for name in ("to_host", "to_device", "bytes_of"):
        monkeypatch.setattr(host, name, refuse)
    monkeypatch.setattr("telegrad.wire.tensor.assembly.to_device", refuse)
    rpc.rpc_sync("worker1", add, args=(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")))
    big = torch.rand(2**24, device="cuda")
    assert torch.equal(rpc.rpc_sync("worker1", echo, args=(big,)), big)


def test_blocks_are_used_again(pair: Cluster) -> None:
    warm()
    sent = torch.rand(2**20, device="cuda")
    for _ in range(5):
        rpc.rpc_sync("worker1", echo, args=(sent,))
    before = channel_to("worker1").lender._next
    for _ in range(20):
        rpc.rpc_sync("worker1", echo, args=(sent,))
    assert channel_to("worker1").lender._next == before


def test_a_worker_that_calls_itself(pair: Cluster) -> None:
    for _ in range(4):
        sent = torch.rand(1000, device="cuda")
        came = rpc.rpc_sync("worker0", echo, args=(sent,))
        assert torch.equal(came, sent) and came.data_ptr() != sent.data_ptr()


def test_without_a_map_a_tensor_goes_to_the_same_gpu(pair: Cluster) -> None:
    assert rpc.rpc_sync("worker1", device_of, args=(torch.ones(2, device="cuda"),)) == "cuda:0"
