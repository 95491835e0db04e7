"""A pipeline with micro-batches: three stages on three workers, and all of them busy at once.

A batch is cut into micro-batches. Each stage passes its result to the next by a call of its own and returns what comes
back, so the activations go from worker to worker and never through the trainer. One backward pass then runs through
all micro-batches, and the gradients of each stage add up in the context. The plot has the loss, and one step as
`telegrad.observe.record` saw it.

    python examples/pipeline.py --steps 30 --micro-batches 4
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from showing import Bar, curves, draw_timeline, load_timeline, picture
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
import telegrad.observe
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


def train_step(stages: list[rpc.RRef[Stage]], optimizer: DistributedOptimizer, x: Tensor, micro_batches: int) -> float:
    """All micro-batches are under way before the first is waited for."""
    y = (x[:, :8].sum(dim=1) > 0).float()
    with autograd.context() as context_id:
        flying = [stages[0].rpc_async().forward(part) for part in x.chunk(micro_batches)]
        scores = torch.cat([future.wait() for future in flying]).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(scores, y)
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


def run(steps: int, batch: int, micro_batches: int, timeline: Path) -> list[float]:
    """Train to tell the sign of a sum, and record the last step; the loss of each."""
    stages = build()
    references = [reference for stage in stages for reference in stage.rpc_sync().references()]
    optimizer = DistributedOptimizer(torch.optim.Adam, references, lr=3e-3)
    data = torch.Generator().manual_seed(0)
    losses = []
    with Bar(steps) as bar:
        for number in range(1, steps + 1):
            x = torch.randn(batch, WIDTH, generator=data)
            with telegrad.observe.record(timeline) if number == steps else nullcontext():
                losses.append(train_step(stages, optimizer, x, micro_batches))
            bar.show(number, f"loss {losses[-1]:.3f}")
    return losses


def draw(output: Path, losses: list[float], micro_batches: int) -> None:
    def fill(left: Any, right: Any) -> None:
        curves(left, {"loss": losses}, "step", "loss", "Three stages on three workers learn")
        draw_timeline(right, timeline, f"One step of {micro_batches} micro-batches")

    timeline = load_timeline(output / "pipeline.json")
    picture(output / "pipeline.png", fill, panels=2, width=12)


def main() -> None:
    parser = argparse.ArgumentParser(description="A pipeline of three stages with micro-batches.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with telegrad.local_cluster(workers=1 + len(STAGES)):
        losses = run(options.steps, options.batch, options.micro_batches, options.output / "pipeline.json")
    draw(options.output, losses, options.micro_batches)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
