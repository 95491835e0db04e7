"""A recurrent language model split over workers: embedding and decoder on one, the LSTM on another, the loss here.

The model learns to continue a repeating sequence of letters. The hidden state stays a tensor of the trainer between
batches, and is cut from the graph there, as in training within one process.

    python examples/rnn.py --steps 150
"""

import argparse
from pathlib import Path

import torch
from showing import Bar, curves, picture
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
from telegrad import autograd, rpc
from telegrad.nn import RemoteModule, remote_parameters
from telegrad.optim import DistributedOptimizer

TEXT = "the quick brown fox jumps over the lazy dog. "
LETTERS = sorted(set(TEXT))
WIDTH, HIDDEN = 16, 48
Hidden = tuple[Tensor, Tensor]


class Recurrence(nn.Module):
    """The LSTM with its hidden state as two plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lstm = nn.LSTM(WIDTH, HIDDEN)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x, (h, c))
        return y, h, c


class Model(nn.Module):
    """Embedding and decoder on worker1, recurrence on worker2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = RemoteModule("worker1", nn.Embedding, args=(len(LETTERS), WIDTH))
        self.recurrence = RemoteModule("worker2", Recurrence)
        self.decoder = RemoteModule("worker1", nn.Linear, args=(HIDDEN, len(LETTERS)))

    def forward(self, letters: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        y, h, c = self.recurrence(self.embedding(letters), *hidden)
        return self.decoder(y), (h, c)


def batches(steps: int, length: int, size: int) -> list[Tensor]:
    """Pieces of the text, one column for each of `size` starting places, each batch continuing the last."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    starts = torch.arange(size) * 7
    places = torch.arange(steps * length + 1)[:, None] + starts
    stream = numbers[places % len(TEXT)]
    return [stream[i * length : (i + 1) * length + 1] for i in range(steps)]


def run(steps: int, length: int, size: int) -> list[float]:
    """Train; the loss of each step."""
    model = Model()
    optimizer = DistributedOptimizer(torch.optim.Adam, remote_parameters(model), lr=0.02)
    hidden: Hidden = (torch.zeros(1, size, HIDDEN), torch.zeros(1, size, HIDDEN))
    losses = []
    with Bar(steps) as bar:
        for number, piece in enumerate(batches(steps, length, size), start=1):
            hidden = (hidden[0].detach(), hidden[1].detach())
            with autograd.context() as context_id:
                scores, hidden = model(piece[:-1], hidden)
                loss = F.cross_entropy(scores.flatten(0, 1), piece[1:].flatten())
                autograd.backward(context_id, [loss])
                optimizer.step(context_id, max_norm=1.0)
            losses.append(loss.item())
            bar.show(number, f"loss {losses[-1]:.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="A recurrent network split over workers.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    with telegrad.local_cluster(workers=3):
        assert rpc.get_worker_info().name == "worker0"
        losses = run(options.steps, options.length, options.size)
    title = "A recurrent network over two workers learns a sentence"
    picture(options.output / "rnn.png", lambda axes: curves(axes, {"loss": losses}, "step", "loss", title))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
