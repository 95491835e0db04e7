"""CUDA tensors arrive equal, on the GPU they are meant for, and do not pass through the host on their way."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import rpc
from telegrad.cuda import host
from tests.cluster import WAYS, Cluster, cluster
from tests.cuda.helpers import add, channel_to, device_of, echo, warm

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
    monkeypatch.setattr("telegrad.wire.assembly.to_device", refuse)
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


def refused(options: dict[str, Any]) -> str:
    """In a worker of its own with torch's options: what a CUDA tensor without a map leads to."""
    import tempfile

    from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions

    with tempfile.TemporaryDirectory() as folder:
        chosen = TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting", **options)
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=chosen)
        try:
            rpc.rpc_sync("alone", echo, args=(torch.ones(1, device="cuda"),))
        except RuntimeError as error:
            return str(error)
        finally:
            rpc.shutdown()
    return ""


def test_the_stand_in_is_strict() -> None:
    text = refused({})
    assert "only supports CPU tensors by default" in text and "set_device_map" in text


@pytest.mark.parametrize(
    ("device_map", "sent", "there"), [({"cpu": 0}, "cpu", "cuda:0"), ({0: "cpu"}, "cuda:0", "cpu")]
)
def test_maps_between_host_and_gpu(device_map: dict[Any, Any], sent: str, there: str) -> None:
    with cluster(2, device_maps={"worker1": device_map}):
        for size in (4, 2**20):
            x = torch.rand(size, device=sent)
            assert rpc.rpc_sync("worker1", device_of, args=(x,)) == there
            came = rpc.rpc_sync("worker1", add, args=(x, x))  # and the reply comes back the other way
            assert str(came.device) == sent
            torch.testing.assert_close(came, x + x)


def test_a_map_to_a_device_that_is_not_there_is_refused_at_the_start() -> None:
    missing = torch.cuda.device_count()
    job = cluster(2, device_maps={"worker1": {0: missing}})
    with pytest.raises(ValueError, match="worker0 has target devices with invalid indices"), job:
        pass
