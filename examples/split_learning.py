"""Split learning: a clinic has the records, a laboratory has the labels, and neither shows its data to the other.

The clinic runs the first layers on its records and sends activations. The laboratory runs the rest, knows the labels,
and sends gradients back. Weights, records and labels stay where they are: the calls below are all that is exchanged.
(What activations tell about the records is a question of its own; add noise or other protection where it matters.)

    python examples/split_learning.py --steps 80
"""

import argparse
from pathlib import Path

import torch
from showing import Bar, curves, picture
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

RECORDS, FEATURES, WIDTH = 512, 12, 16


def secret_rule(records: Tensor) -> Tensor:
    """What the world is like; used only to make data for both parties."""
    return ((records[:, 0] * records[:, 1] + records[:, 2]) > 0).long()


def records() -> Tensor:
    return torch.randn(RECORDS, FEATURES, generator=torch.Generator().manual_seed(7))


class Party:
    """What both have in common: some layers, and references to their weights (which stay here)."""

    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


class Clinic(Party):
    """Has the records."""

    def __init__(self) -> None:
        super().__init__(1, FEATURES, WIDTH)
        self.records = records()

    def activations(self, rows: Tensor) -> Tensor:
        """What the clinic shows of the records in `rows`."""
        return torch.relu(self.layers(self.records[rows]))


class Laboratory(Party):
    """Has the labels."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH, 2)
        self.labels = secret_rule(records())

    def loss(self, clinic: rpc.RRef[Clinic], rows: Tensor) -> Tensor:
        """The loss on some rows; asks the clinic for activations."""
        return F.cross_entropy(self.layers(clinic.rpc_sync().activations(rows)), self.labels[rows])

    def accuracy(self, clinic: rpc.RRef[Clinic]) -> float:
        """How many labels the network gets right."""
        guesses = self.layers(clinic.rpc_sync().activations(torch.arange(RECORDS))).argmax(dim=1)
        return float((guesses == self.labels).float().mean())


def run(steps: int, batch: int) -> tuple[list[float], list[float]]:
    """Train as the coordinator, which sees neither records nor labels; the loss and the accuracy along the way."""
    clinic, laboratory = rpc.remote("clinic", Clinic), rpc.remote("laboratory", Laboratory)
    references = clinic.rpc_sync().references() + laboratory.rpc_sync().references()
    optimizer = DistributedOptimizer(torch.optim.Adam, references, lr=0.01)
    losses, accuracies = [], [laboratory.rpc_sync().accuracy(clinic)]
    with Bar(steps) as bar:
        for number in range(1, steps + 1):
            rows = torch.randperm(RECORDS)[:batch]
            with autograd.context() as context_id:
                loss = laboratory.rpc_sync().loss(clinic, rows)
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
            accuracies.append(laboratory.rpc_sync().accuracy(clinic))
            bar.show(number, f"loss {losses[-1]:.3f}  accuracy {accuracies[-1]:.1%}")
    return losses, accuracies


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Two parties train one network and share activations and gradients only."
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    torch.manual_seed(0)
    with telegrad.local_cluster(names=["coordinator", "clinic", "laboratory"]):
        losses, accuracies = run(options.steps, options.batch)
    series = {"loss": losses, "accuracy": accuracies[1:]}
    title = "Two parties train one network; neither sees the other's data"
    picture(options.output / "split_learning.png", lambda axes: curves(axes, series, "step", "", title))
    print(f"accuracy {accuracies[0]:.1%} -> {accuracies[-1]:.1%}")


if __name__ == "__main__":
    main()
