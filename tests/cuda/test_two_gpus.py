"""What takes two GPUs: maps between them, and tensors that come from the other one. No machine here has run these."""

from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from tests.cluster import cluster
from tests.cuda.helpers import LONG, add, device_of, echo

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("device_map", [{0: 1}, {0: 1, 1: 0}, {0: 0, 1: 1}])
def test_maps_between_gpus(device_map: dict[int, int]) -> None:
    with cluster(2, device_maps={"worker1": device_map}):
        for here, there in device_map.items():
            for size in (4, 2**22):
                x = torch.rand(size, device=f"cuda:{here}")
                assert rpc.rpc_sync("worker1", device_of, args=(x,)) == f"cuda:{there}"
                for _ in range(3):
                    came: Any = rpc.rpc_sync("worker1", echo, args=(x,))
                    assert came.device == x.device and torch.equal(came, x)


def slowly(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(LONG)
    return x + 1


def test_work_on_one_gpu_is_seen_on_the_other() -> None:
    with cluster(2, device_maps={"worker1": {0: 1}}):
        for _ in range(3):
            x = torch.zeros(2**20, device="cuda:0", requires_grad=True)
            with autograd.context() as context_id:
                with torch.cuda.device(0):
                    torch.cuda._sleep(LONG)
                y = rpc.rpc_sync("worker1", slowly, args=(x + 2,))
                autograd.backward(context_id, [y.sum()])
                assert y.unique().tolist() == [3.0]
                assert autograd.get_gradients(context_id)[x].unique().tolist() == [1.0]


def test_tensors_of_two_gpus_in_one_message() -> None:
    with cluster(2):
        sent = [torch.full((1000,), float(i), device=f"cuda:{i}") for i in range(2)]
        for _ in range(3):
            came = rpc.rpc_sync("worker1", echo, args=(sent,))
            assert [str(t.device) for t in came] == ["cuda:0", "cuda:1"]
            assert all(torch.equal(one, other) for one, other in zip(came, sent, strict=True))
        with pytest.raises(RuntimeError, match="same device"):
            rpc.rpc_sync("worker1", add, args=tuple(sent))


def nccl_step(rank: int, folder: str) -> list[torch.Tensor]:
    """One step of a replica of two over NCCL, each in a worker and on a GPU of its own."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda(rank), device_ids=[rank])
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(rank)).cuda(rank)
        model(x).square().mean().backward()
        return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    finally:
        dist.destroy_process_group()


def test_replicas_over_nccl_within_workers(tmp_path: Path) -> None:
    with cluster(2):
        futures = [rpc.rpc_async(f"worker{rank}", nccl_step, args=(rank, str(tmp_path))) for rank in range(2)]
        one, other = [future.wait() for future in futures]
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs)
