"""Device maps between the host and the GPU, and what is refused."""

from typing import Any

import pytest
import torch

from telegrad import rpc
from tests.cluster import cluster
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


def test_a_map_to_a_device_that_is_not_there_is_refused_at_the_start() -> None:
    missing = torch.cuda.device_count()
    job = cluster(2, device_maps={"worker1": {0: missing}})
    with pytest.raises(ValueError, match="worker0 has target devices with invalid indices"), job:
        pass
