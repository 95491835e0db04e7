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
from tests.cuda.helpers import LONG


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


class _SlowGradient(torch.autograd.Function):
    """The identity, whose gradient takes long."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        torch.cuda._sleep(LONG // 4)
        return gradient * 1


class SlowLinear(torch.nn.Module):
    """A layer whose gradients are there long after the call that makes them has returned."""

    def __init__(self, seed: int, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = linear(seed, inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        return _SlowGradient.apply(self.linear(_SlowGradient.apply(x)))


def test_the_optimizer_and_the_next_step_wait_for_slow_gradients(pair: Cluster) -> None:
    """No thread waits for the GPU: the step, and the next pass, are asked for while gradients are still being made."""
    remote, local = RemoteModule("worker1/cuda:0", SlowLinear, (0, 256, 256)), SlowLinear(0, 256, 256).cuda()
    head, local_head = SlowLinear(1, 256, 1).cuda(), SlowLinear(1, 256, 1).cuda()
    references = [*remote.remote_parameters(), *[rpc.RRef(p) for p in head.parameters()]]
    distributed = DistributedOptimizer(torch.optim.SGD, references, lr=0.05, momentum=0.9)
    optimizer = torch.optim.SGD([*local.parameters(), *local_head.parameters()], lr=0.05, momentum=0.9)
    for step in range(4):
        x = torch.rand(64, 256, generator=torch.Generator().manual_seed(step)).cuda()
        with autograd.context() as context_id:
            autograd.backward(context_id, [head(remote(x).to("cuda")).square().mean()])
            distributed.step(context_id)
        optimizer.zero_grad()
        local_head(local(x)).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(head.parameters(), local_head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    expected = local.state_dict()
    for name, value in remote.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name].cpu())


# --- mixed precision beyond one call ---


def multiply(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def test_the_callers_autocast_goes_along(pair: Cluster) -> None:
    x, w = torch.rand(32, 16, device="cuda"), torch.rand(16, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        assert rpc.rpc_sync("worker1", rpc.with_autocast(multiply), args=(x, w)).dtype == torch.float16
        assert rpc.rpc_sync("worker1", multiply, args=(x, w)).dtype == torch.float32
    assert rpc.rpc_sync("worker1", rpc.with_autocast(multiply), args=(x, w)).dtype == torch.float32


def in_half(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return x @ w


def test_a_scaled_loss(pair: Cluster) -> None:
    """Gradients too small for half precision survive: the loss is scaled before the pass, as GradScaler does."""
    x = torch.rand(32, 16, device="cuda", requires_grad=True)
    w = torch.rand(16, 8, device="cuda", requires_grad=True)
    scale = 2.0**16
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", in_half, args=(x, w)).float().mean() * 1e-6
        autograd.backward(context_id, [loss * scale])
        ours = {name: autograd.get_gradients(context_id)[leaf] / scale for name, leaf in (("x", x), ("w", w))}
    (in_half(x, w).float().mean() * 1e-6 * scale).backward()
    for name, leaf in (("x", x), ("w", w)):
        assert leaf.grad is not None and leaf.grad.abs().sum() > 0
        torch.testing.assert_close(ours[name], leaf.grad / scale)


# --- replicas within a distributed pass ---


def stretched(x: Tensor) -> Tensor:
    return x * torch.arange(1.0, x.shape[-1] + 1, device=x.device)


def hybrid_steps(rank: int, folder: str, backend: str, size: int) -> list[list[Tensor]]:
    """Steps of a replica whose inputs come through another worker: the gradients are reduced within the pass."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    name = f"{folder}/{backend}{rank if size == 1 else ''}"
    dist.init_process_group(backend, init_method=f"file://{name}", rank=rank if size > 1 else 0, world_size=size)
    try:
        replica = DistributedDataParallel(linear(0, 4, 2).cuda(), device_ids=[0])
        found = []
        for step in range(3):
            x = hybrid_input(rank, step)
            with autograd.context() as context_id:
                there = rpc.rpc_sync(f"worker{1 - rank}", stretched, args=(x,))
                autograd.backward(context_id, [replica(there).square().mean()])
                gradients = autograd.get_gradients(context_id)
                found.append([gradients[parameter].cpu() for parameter in replica.parameters()])
        del replica
        return found
    finally:
        dist.destroy_process_group()


def hybrid_input(rank: int, step: int) -> Tensor:
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)).cuda().requires_grad_()


def gradients_of(ranks: list[int], step: int) -> list[Tensor]:
    """The mean over these replicas, in one process."""
    model = linear(0, 4, 2).cuda()
    for rank in ranks:
        (model(stretched(hybrid_input(rank, step))).square().mean() / len(ranks)).backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("nccl", 1)])
def test_replicas_reduce_within_a_distributed_pass(pair: Cluster, tmp_path: Path, backend: str, size: int) -> None:
    """With NCCL each replica is alone: two of them cannot share one GPU (`test_two_gpus.py` has two)."""
    other = rpc.rpc_async("worker1", hybrid_steps, args=(1, str(tmp_path), backend, size), timeout=120)
    mine = hybrid_steps(0, str(tmp_path), backend, size)
    for rank, found in enumerate((mine, other.wait())):
        for step, gradients in enumerate(found):
            for ours, theirs in zip(gradients, gradients_of([0, 1] if size == 2 else [rank], step), strict=True):
                torch.testing.assert_close(ours, theirs)
