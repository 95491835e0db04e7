"""Train a network that is split over three worker processes to read handwritten digits, and draw what happened.

The first layers live on worker `stem`, the next on `trunk`. The weights of the last layer live on the parameter server
`server`: the trainer, which is this process, fetches them in each step and uses them here. `backward` runs through all
of it, and one optimizer steps on all three owners.

    make demo            or: python examples/demo.py --epochs 5 --output demo-output
"""

import argparse
from pathlib import Path

import demo_picture as picture
import torch
from showing import Bar
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
import telegrad.observe
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

HELD_OUT = 360
BATCH = 64
DRAWN_STEPS = 2
WORKERS = ("trainer", "stem", "trunk", "server")


class Stage(nn.Module):
    """Some layers of the network, on the worker that owns them."""

    def __init__(self, seed: int, *layers: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(*layers)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_uniform_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class ParameterServer(Stage):
    """The last layer's weights, for whoever asks."""

    def weights(self) -> list[Tensor]:
        return list(self.parameters())


class Network:
    """The network as the trainer sees it: three references."""

    def __init__(self) -> None:
        stem = (nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.stem = rpc.remote("stem", Stage, args=(0, *stem))
        self.trunk = rpc.remote("trunk", Stage, args=(1, nn.Linear(256, 64), nn.ReLU()))
        self.server = rpc.remote("server", ParameterServer, args=(2, nn.Linear(64, 10)))

    def __call__(self, images: Tensor) -> Tensor:
        weights = self.server.rpc_async().weights()  # on its way while the others work
        hidden = self.trunk.rpc_sync().forward(self.stem.rpc_sync().forward(images))
        return F.linear(hidden, *weights.wait())

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [ref for part in (self.stem, self.trunk, self.server) for ref in part.rpc_sync().references()]


def train_step(network: Network, optimizer: DistributedOptimizer, images: Tensor, labels: Tensor) -> float:
    with autograd.context() as context_id:
        loss = F.cross_entropy(network(images), labels)
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


def accuracy(network: Network, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (network(images).argmax(dim=1) == labels).float().mean().item()


def train(epochs: int, images: Tensor, labels: Tensor, timeline: Path) -> tuple[list[float], list[float]]:
    """Train; then record two more steps. Returns the loss of each step and the accuracy after each epoch."""
    mixed = torch.randperm(len(labels))
    held_out, seen = mixed[:HELD_OUT], mixed[HELD_OUT:]
    network = Network()
    optimizer = DistributedOptimizer(torch.optim.Adam, network.references(), lr=3e-3)
    losses, accuracies = [], []
    with Bar(epochs, "epoch") as bar:
        for epoch in range(1, epochs + 1):
            for batch in torch.split(seen[torch.randperm(len(seen))], BATCH):
                losses.append(train_step(network, optimizer, images[batch], labels[batch]))
            accuracies.append(accuracy(network, images[held_out], labels[held_out]))
            bar.show(epoch, f"loss {losses[-1]:.3f}  held-out {accuracies[-1]:.1%}")
    with telegrad.observe.record(timeline):
        for batch in torch.split(seen, BATCH)[:DRAWN_STEPS]:
            train_step(network, optimizer, images[batch], labels[batch])
    return losses, accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a split network on digits and draw what happened.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    options.output.mkdir(parents=True, exist_ok=True)
    print("starting workers stem, trunk and server ...")
    with telegrad.local_cluster(names=WORKERS):
        losses, accuracies = train(options.epochs, images, labels, options.output / "timeline.json")
    for path in picture.draw(options.output, losses, accuracies):
        print(f"see {path}")


if __name__ == "__main__":
    main()
