"""A parameter server and several trainers: each trainer fetches weights, computes a loss on its own data, and steps.

The server only holds parameters. The trainers do not wait for each other, so a step may be based on weights that
another trainer has just changed: asynchronous training, as parameter servers do it.

    python examples/parameter_server.py --trainers 2 --steps 100
"""

import argparse
import threading
from pathlib import Path

import torch
from showing import Bar, curves, picture
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

TRUE_WEIGHT = torch.tensor([[2.0, -3.0, 0.5, 1.0]])


class ParameterServer:
    """A linear model's parameters."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(1, 4))
        self.bias = nn.Parameter(torch.zeros(1))

    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(self.weight), rpc.RRef(self.bias)]


class Progress:
    """What the trainers tell the process that started them, which shows it."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._done, self._lock = bar, 0, threading.Lock()

    def step(self, trainer: int, loss: float) -> None:
        with self._lock:  # trainers tell at the same time, each call has a thread of its own
            self._done += 1
            self._bar.show(self._done, f"trainer {trainer}: loss {loss:.4f}")


def train(
    server: rpc.RRef[ParameterServer], seed: int, steps: int, lr: float, progress: "rpc.RRef[Progress] | None" = None
) -> list[float]:
    """One trainer's whole work, on its own worker; the losses it saw."""
    data = torch.Generator().manual_seed(seed)
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().references(), lr=lr)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 4, generator=data)
        y = x @ TRUE_WEIGHT.T + 1.0
        with autograd.context() as context_id:
            weight, bias = server.rpc_sync().parameters()
            loss = F.mse_loss(F.linear(x, weight, bias), y)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        if progress is not None:
            progress.rpc_sync().step(seed, losses[-1])
    return losses


def run(trainers: int, steps: int, lr: float) -> tuple[list[list[float]], float]:
    """Train; the losses of each trainer, and how far the weights are from the true ones at the end."""
    server = rpc.remote("server", ParameterServer)
    with Bar(trainers * steps) as bar:
        progress = rpc.RRef(Progress(bar))
        futures = [
            rpc.rpc_async(f"trainer{i}", train, args=(server, i, steps, lr, progress), timeout=0)
            for i in range(trainers)
        ]
        losses = [future.wait() for future in futures]
    weight, bias = (parameter.detach() for parameter in server.rpc_sync().parameters())
    error = max(float((weight - TRUE_WEIGHT).abs().max()), float((bias - 1.0).abs()))
    return losses, error


def main() -> None:
    parser = argparse.ArgumentParser(description="A parameter server with several trainers.")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    names = ["main", "server", *(f"trainer{i}" for i in range(options.trainers))]
    with telegrad.local_cluster(names=names):
        losses, error = run(options.trainers, options.steps, options.lr)
    series = {f"trainer {i}": values for i, values in enumerate(losses)}
    title = "Each trainer's loss, with weights that all of them change"
    path = options.output / "parameter_server.png"
    picture(path, lambda axes: curves(axes, series, "step", "loss", title, scale="log"))
    print(f"largest error of a weight: {error:.5f}")


if __name__ == "__main__":
    main()
