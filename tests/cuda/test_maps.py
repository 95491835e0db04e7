"""Device maps between the host and the GPU, and what is refused."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from tests.cluster import cluster, end, join, process, serve
from tests.cuda.helpers import add, device_of, echo


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


def scaled(x: torch.Tensor, device: str) -> torch.Tensor:
    """Gives what it was given another factor for each element; only on the device where it is meant to run."""
    assert str(x.device) == device
    return x * torch.arange(x.numel(), device=device)


@pytest.mark.parametrize("size", [4, 2**20], ids=["small", "large"])
@pytest.mark.parametrize(
    ("device_map", "sent", "there"), [({"cpu": 0}, "cpu", "cuda:0"), ({0: "cpu"}, "cuda:0", "cpu")]
)
def test_gradients_go_back_over_a_map(device_map: dict[Any, Any], sent: str, there: str, size: int) -> None:
    with cluster(2, device_maps={"worker1": device_map}):
        x = torch.rand(size, device=sent, requires_grad=True)
        for _ in range(3):
            with autograd.context() as context_id:
                out = rpc.rpc_sync("worker1", scaled, args=(x * 2, there))
                assert str(out.device) == sent
                autograd.backward(context_id, [out.sum()])
                gradient = autograd.get_gradients(context_id)[x]
            assert gradient.device == x.device
            torch.testing.assert_close(gradient, 2.0 * torch.arange(size, device=sent))


def test_a_reference_over_a_map() -> None:
    with cluster(2, device_maps={"worker1": {0: "cpu"}}):
        x = torch.rand(1000, device="cuda")
        there = rpc.remote("worker1", echo, args=(x,))
        assert rpc.rpc_sync("worker1", device_of_value, args=(there,)) == "cpu"
        came = there.to_here()
        assert came.device == x.device and torch.equal(came, x)


def device_of_value(reference: Any) -> str:
    return str(reference.local_value().device)


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_map_of_a_device_that_is_not_there_is_refused_at_the_start(role: str) -> None:
    missing = torch.cuda.device_count()
    job = cluster(2, device_maps={"worker1": {missing: 0} if role == "source" else {0: missing}})
    with pytest.raises(ValueError, match=f"worker0 has {role} devices with invalid indices"), job:
        pass


# --- a worker that sees no GPU ---


def serve_without_gpu(name: str, rank: int, size: int, meeting: str, options: dict[str, Any]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    serve(name, rank, size, meeting, options)


@contextlib.contextmanager
def with_a_blind_worker(folder: Path, **options: Any) -> Iterator[None]:
    meeting = f"file://{folder}/meeting"
    other = process(serve_without_gpu, "worker1", 1, 2, meeting, {})
    try:
        join("worker0", 0, 2, meeting, options)
        try:
            yield
        finally:
            rpc.shutdown(timeout=60)
    finally:
        end([other], patience=60)


def test_a_worker_that_does_not_see_the_gpu_is_sent_none_of_it(tmp_path: Path) -> None:
    with with_a_blind_worker(tmp_path):
        with pytest.raises(RuntimeError, match="does not see the same GPU"):
            rpc.rpc_sync("worker1", echo, args=(torch.ones(4, device="cuda"),))
        assert rpc.rpc_sync("worker1", echo, args=(torch.ones(4),)).tolist() == [1.0] * 4


def test_a_map_takes_tensors_to_a_worker_without_a_gpu(tmp_path: Path) -> None:
    with with_a_blind_worker(tmp_path, device_maps={"worker1": {0: "cpu"}}):
        x = torch.rand(2**20, device="cuda", requires_grad=True)
        for _ in range(3):
            with autograd.context() as context_id:
                out = rpc.rpc_sync("worker1", scaled, args=(x, "cpu"))
                assert out.device == x.device
                autograd.backward(context_id, [out.sum()])
                gradient = autograd.get_gradients(context_id)[x]
            torch.testing.assert_close(gradient, torch.arange(2.0**20, device="cuda"))
