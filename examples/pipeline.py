"""A pipeline with micro-batches: three stages on three workers, and all of them busy at once.

A batch is cut into micro-batches. Each stage passes its result to the next by a call of its own and returns what comes
back, so the activations go from worker to worker and never through the trainer. One backward pass then runs through
all micro-batches, and the gradients of each stage add up in the context.

    python examples/pipeline.py --steps 30 --micro-batches 4
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

STAGES = ("worker1", "worker2", "worker3")
WIDTH = 64


class Stage(nn.Module):
    """A part of the network, and the part that follows it."""

    def __init__(self, seed: int, outputs: int, following: "rpc.RRef[Stage] | None") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))
        self.following = following

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y if self.following is None else self.following.rpc_sync().forward(torch.tanh(y))

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def build() -> list[rpc.RRef[Stage]]:
    """The stages, the last one first, since each has to know the next."""
    stages: list[rpc.RRef[Stage]] = []
    for number in reversed(range(len(STAGES))):
        last = number == len(STAGES) - 1
        following = None if last else stages[0]
        stages.insert(0, rpc.remote(STAGES[number], Stage, args=(number, 1 if last else WIDTH, following)))
    return stages


def run(steps: int, batch: int, micro_batches: int) -> list[float]:
    """Train to tell the sign of a sum; the loss of each step."""
    stages = build()
    references = [reference for stage in stages for reference in stage.rpc_sync().references()]
    optimizer = DistributedOptimizer(torch.optim.Adam, references, lr=3e-3)
    data = torch.Generator().manual_seed(0)
    losses = []
    begun = time.monotonic()
    for _ in range(steps):
        x = torch.randn(batch, WIDTH, generator=data)
        y = (x[:, :8].sum(dim=1) > 0).float()
        with autograd.context() as context_id:
            flying = [stages[0].rpc_async().forward(part) for part in x.chunk(micro_batches)]
            scores = torch.cat([future.wait() for future in flying]).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(scores, y)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    print(f"{1e3 * (time.monotonic() - begun) / steps:.1f} ms a step with {micro_batches} micro-batches")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="A pipeline of three stages with micro-batches.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    with telegrad.local_cluster(workers=1 + len(STAGES)):
        losses = run(options.steps, options.batch, options.micro_batches)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
