"""Training with parameters on the GPU: equal to one process, whatever part of the graph is on which device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, nn, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.cluster import Cluster


def linear(seed: int, inner: int, outer: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(inner, outer)


def test_a_remote_module_and_its_optimizer(pair: Cluster) -> None:
    remote = RemoteModule("worker1/cuda:0", linear, (0, 8, 4))
    local = linear(0, 8, 4).cuda()
    head, local_head = linear(1, 4, 1).cuda(), linear(1, 4, 1).cuda()
    references = [*remote.remote_parameters(), *[rpc.RRef(p) for p in head.parameters()]]
    distributed = DistributedOptimizer(torch.optim.Adam, references, lr=0.05)
    optimizer = torch.optim.Adam([*local.parameters(), *local_head.parameters()], lr=0.05)
    for step in range(4):
        x = torch.rand(16, 8, generator=torch.Generator().manual_seed(step)).cuda()
        with autograd.context() as context_id:
            out = remote(x).to("cuda")
            autograd.backward(context_id, [head(out).square().mean()])
            distributed.step(context_id)
        optimizer.zero_grad()
        local_head(local(x)).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(head.parameters(), local_head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for name, value in remote.state_dict().items():
        torch.testing.assert_close(value.cpu(), local.state_dict()[name].cpu())


def test_saved_on_the_gpu_and_restored_on_the_host(pair: Cluster, tmp_path: Path) -> None:
    model = torch.nn.Sequential(RemoteModule("worker1/cuda:0", linear, (0, 3, 3)), linear(1, 3, 2).cuda())
    nn.save(model, tmp_path / "model.pt")
    other = torch.nn.Sequential(RemoteModule("worker1", linear, (5, 3, 3)), linear(6, 3, 2))
    nn.restore(other, tmp_path / "model.pt")
    expected = {**linear(0, 3, 3).state_dict(prefix="0."), **linear(1, 3, 2).state_dict(prefix="1.")}
    found = nn.state_dict(other)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.cpu(), expected[name])


def test_saved_on_the_host_and_restored_on_the_gpu(pair: Cluster, tmp_path: Path) -> None:
    nn.save(torch.nn.Sequential(RemoteModule("worker1", linear, (0, 3, 3)), linear(1, 3, 2)), tmp_path / "model.pt")
    other = torch.nn.Sequential(RemoteModule("worker1/cuda:0", linear, (5, 3, 3)), linear(6, 3, 2).cuda())
    nn.restore(other, tmp_path / "model.pt")
    expected = {**linear(0, 3, 3).state_dict(prefix="0."), **linear(1, 3, 2).state_dict(prefix="1.")}
    for name, value in nn.state_dict(other).items():
        torch.testing.assert_close(value.cpu(), expected[name])
    assert next(iter(other[1].parameters())).is_cuda


class Tower(torch.nn.Module):
    """Half of it on the host, half on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4).cuda()

    def forward(self, x: Tensor) -> Tensor:
        here = self.first(x.cpu()).relu()
        return self.second(here.cuda())


def make_tower() -> Tower:
    return Tower()


def run_tower(tower: Any, x: Tensor) -> Tensor:
    return tower.local_value()(x)


def tower_gradients(tower: Any, context_id: int) -> list[Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[p].cpu() for p in tower.local_value().parameters()]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_graph_over_host_and_gpu(pair: Cluster, device: str) -> None:
    tower, local = rpc.remote("worker1", make_tower), Tower()
    x = torch.ones(2, 4, device=device, requires_grad=True)
    with autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", run_tower, args=(tower, x * 2))
        autograd.backward(context_id, [(out.cpu() * 3).sum()])
        gradient = autograd.get_gradients(context_id)[x]
        theirs = rpc.rpc_sync("worker1", tower_gradients, args=(tower, context_id))
    y = torch.ones(2, 4, device=device, requires_grad=True)
    (local(y * 2).cpu() * 3).sum().backward()
    torch.testing.assert_close(gradient, y.grad)
    for found, param in zip(theirs, local.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(found, param.grad.cpu())


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return x @ w


def test_mixed_precision(pair: Cluster) -> None:
    torch.manual_seed(0)
    x = torch.rand(32, 16, device="cuda", requires_grad=True)
    w = torch.rand(16, 8, device="cuda", requires_grad=True)
    with autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", under_autocast, args=(x, w))
        assert out.dtype == torch.bfloat16
        autograd.backward(context_id, [out.float().square().mean()])
        ours = autograd.get_gradients(context_id)
    under_autocast(x, w).float().square().mean().backward()
    torch.testing.assert_close(ours[x], x.grad)
    torch.testing.assert_close(ours[w], w.grad)


def ddp_step(rank: int, folder: str, seed: int) -> list[Tensor]:
    """One step of a replica of two, in a worker: DistributedDataParallel over gloo, with CUDA parameters."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{folder}/ddp", rank=rank, world_size=2)
    try:
        model = DistributedDataParallel(linear(0, 4, 2).cuda(), device_ids=[0])
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(seed + rank)).cuda()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]
    finally:
        dist.destroy_process_group()


def test_replicas_within_workers(pair: Cluster, tmp_path: Path) -> None:
    futures = [rpc.rpc_async(f"worker{rank}", ddp_step, args=(rank, str(tmp_path), 0)) for rank in range(2)]
    one, other = [future.wait() for future in futures]
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs)
