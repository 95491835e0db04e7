"""Learning to learn: MAML over two workers, whose inner steps are differentiated through.

Each half of a small network lives on its own worker. For each task the halves take one step of gradient descent, with a
graph; the loss after that step is differentiated with respect to the weights before it. So the outer gradient is one of
a gradient, and both run over both workers.

    python examples/maml.py --rounds 200
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from showing import BLUE, GREY, RED, Bar, curves, picture
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

INNER_LR = 0.05
EVERY = 10  # rounds between two looks at tasks that are not learnt from


class Half:
    """A layer whose weights are learnt, and the weights after an inner step."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        torch.manual_seed(seed)
        layer = nn.Linear(inputs, outputs)
        self.weights = [nn.Parameter(p.detach().clone()) for p in layer.parameters()]
        self.fast: list[Tensor] = list(self.weights)

    def references(self) -> list[rpc.RRef[Tensor]]:
        return [rpc.RRef(weight) for weight in self.weights]

    def forward(self, x: Tensor, adapted: bool) -> Tensor:
        weight, bias = self.fast if adapted else self.weights
        return F.linear(x, weight, bias)

    def adapt(self, gradients: list[rpc.RRef[Tensor]]) -> None:
        """One inner step, as part of the graph."""
        self.fast = [w - INNER_LR * g.local_value() for w, g in zip(self.weights, gradients, strict=True)]


def predict(first: Any, second: Any, x: Tensor, adapted: bool) -> Tensor:
    hidden = torch.tanh(first.rpc_sync().forward(x, adapted))
    result: Tensor = second.rpc_sync().forward(hidden, adapted)
    return result


def task(data: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of a sine wave of some height and phase."""
    height, phase = torch.rand(2, generator=data) * torch.tensor([2.0, 3.0]) + torch.tensor([1.0, 0.0])
    x = torch.rand(20, 1, generator=data) * 6 - 3
    return x, height * torch.sin(x + phase)


class Learner:
    """Both halves, from the worker that trains them."""

    def __init__(self) -> None:
        self.halves = [rpc.remote("worker1", Half, args=(1, 40, 1)), rpc.remote("worker2", Half, args=(40, 1, 2))]
        self.weights = [reference for half in self.halves for reference in half.rpc_sync().references()]

    def loss_after_one_step(self, context_id: int, x: Tensor, y: Tensor) -> Tensor:
        """Learn from one half of a task, and try the other."""
        first, second = self.halves
        inner = F.mse_loss(predict(first, second, x[:10], adapted=False), y[:10])
        gradients = list(autograd.grad(context_id, [inner], self.weights, create_graph=True))
        first.rpc_sync().adapt(gradients[:2])
        second.rpc_sync().adapt(gradients[2:])
        return F.mse_loss(predict(first, second, x[10:], adapted=True), y[10:])

    def mean_loss(self, tasks: list[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for x, y in tasks:
            with autograd.context() as context_id:
                total += self.loss_after_one_step(context_id, x, y).item()
        return total / len(tasks)


def run(learner: Learner, rounds: int, lr: float) -> list[float]:
    """The mean loss after one inner step on tasks that are not learnt from, every ten rounds."""
    optimizer = DistributedOptimizer(torch.optim.Adam, learner.weights, lr=lr)
    data = torch.Generator().manual_seed(0)
    held_out = [task(data) for _ in range(20)]
    found = [learner.mean_loss(held_out)]
    with Bar(rounds, "round") as bar:
        for number in range(1, rounds + 1):
            x, y = task(data)
            with autograd.context() as context_id:
                autograd.backward(context_id, [learner.loss_after_one_step(context_id, x, y)])
                optimizer.step(context_id)
            if number % EVERY == 0 or number == rounds:
                found.append(learner.mean_loss(held_out))
            bar.show(number, f"loss after one step {found[-1]:.3f}")
    return found


def draw(learner: Learner, found: list[float], path: Path) -> None:
    """The loss, and what one inner step makes of a wave that was never seen."""
    x, y = task(torch.Generator().manual_seed(99))
    everywhere = torch.linspace(-3, 3, 200)[:, None]
    first, second = learner.halves
    with torch.no_grad():
        before = predict(first, second, everywhere, adapted=False)
    with autograd.context() as context_id:
        learner.loss_after_one_step(context_id, x, y)
        after = predict(first, second, everywhere, adapted=True).detach()

    def fill(left: Any, right: Any) -> None:
        curves(left, {"": found}, f"rounds, by {EVERY}", "loss", "The loss after one inner step falls")
        right.plot(everywhere, before, color=GREY, label="before the step")
        right.plot(everywhere, after, color=BLUE, label="after one step on ten points")
        right.scatter(x[:10], y[:10], color=RED, zorder=3, label="those points")
        right.scatter(x[10:], y[10:], color=RED, alpha=0.3, label="the rest of the wave")
        right.set(xlabel="x", ylabel="y", title="One step towards a wave it never saw")
        right.legend(fontsize=8)

    picture(path, fill, panels=2, width=12)


def main() -> None:
    parser = argparse.ArgumentParser(description="MAML over two workers.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    with telegrad.local_cluster(workers=3):
        learner = Learner()
        found = run(learner, options.rounds, options.lr)
        draw(learner, found, options.output / "maml.png")
    print(f"loss {found[0]:.4f} -> {found[-1]:.4f}")


if __name__ == "__main__":
    main()
