"""Fine-tuning a language model that is split over two workers: the weights stay frozen, small adapters are learnt.

First the model learns English from the manual that ships with Python; this stands for the large model somebody else
trained. Then its weights are frozen, adapters of low rank are put beside them on both workers, and those learn a new
task: to write Python. Nothing is downloaded.

    python examples/finetune/finetune.py --pretrain 200 --steps 120
"""

import argparse
import argparse as a_program  # one of the sources it learns from
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformer import WINDOW, Stage

import telegrad
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

sys.path.append(str(Path(__file__).parents[1]))
from showing import BLUE, GREY, Bar, curves, picture

STAGES = ("lower", "upper")
BATCH, MICRO_BATCHES = 32, 2


class Text:
    """A text as numbers, the end of it held out."""

    def __init__(self, text: str) -> None:
        letters = torch.tensor(list(text.encode("ascii", "ignore")))
        cut = len(letters) * 9 // 10
        self.seen, self.held_out = letters[:cut], letters[cut:]

    def batch(self, chance: torch.Generator, held_out: bool = False, size: int = BATCH) -> Tensor:
        """Windows from anywhere, each with the letter that follows it."""
        letters = self.held_out if held_out else self.seen
        begin = torch.randint(len(letters) - WINDOW, (size, 1), generator=chance)
        return letters[begin + torch.arange(WINDOW + 1)]


def english() -> Text:
    from pydoc_data import topics

    return Text(" ".join(" ".join(topics.topics.values()).split()))  # without its indentation: that is to be learnt


def python() -> Text:
    return Text("\n".join(map(inspect.getsource, (a_program, inspect, textwrap))))


class Model:
    """Both stages, as the process that trains them sees them."""

    def __init__(self, blocks: int) -> None:
        upper = rpc.remote("upper", Stage, args=(1, blocks, None))
        self.stages = [rpc.remote("lower", Stage, args=(0, blocks, upper)), upper]

    def loss(self, windows: Tensor, learning: bool = True) -> Tensor:
        """Micro-batches, so that one stage works while the other does."""
        lower = self.stages[0]
        parts = [lower.rpc_async().loss(w[:, :-1], w[:, 1:], learning) for w in windows.chunk(MICRO_BATCHES)]
        return torch.stack([part.wait() for part in parts]).mean()

    def held_out_loss(self, text: Text) -> float:
        windows = text.batch(torch.Generator().manual_seed(9), held_out=True, size=64)
        return self.loss(windows, learning=False).item()

    def train(self, text: Text, steps: int, lr: float, what: str, every: int = 10) -> tuple[list[float], list[float]]:
        """Train what is not frozen; the loss of each step, and on what was held out every few steps."""
        learnt = [reference for stage in self.stages for reference in stage.rpc_sync().learnt()]
        optimizer = DistributedOptimizer(torch.optim.AdamW, learnt, lr=lr)
        chance = torch.Generator().manual_seed(0)
        losses, held_out = [], [self.held_out_loss(text)]
        with Bar(steps, what) as bar:
            for number in range(1, steps + 1):
                with autograd.context() as context_id:
                    loss = self.loss(text.batch(chance))
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id, max_norm=1.0)
                losses.append(loss.item())
                if number % every == 0 or number == steps:
                    held_out.append(self.held_out_loss(text))
                bar.show(number, f"loss {losses[-1]:.3f}  held-out {held_out[-1]:.3f}")
        return losses, held_out

    def write(self, begin: str, letters: int) -> str:
        """What the model goes on with."""
        for _ in range(letters):
            window = torch.tensor([list(begin.encode())[-WINDOW:]])
            begin += chr(self.stages[0].rpc_sync().next_letter(window, 0.6))
        return begin


def draw(path: Path, losses: list[float], held_out: list[float], every: int = 10) -> None:
    def fill(left: Any, right: Any) -> None:
        curves(left, {"": losses}, "step", "loss", "Before: the whole model learns English")
        steps = [every * number for number in range(len(held_out))]
        right.plot(steps, held_out, color=BLUE, marker="o", ms=3, label="with adapters")
        right.axhline(held_out[0], color=GREY, ls="--", label="the frozen model alone")
        right.set(xlabel="step", ylabel="loss on code that was held out", title="Then: adapters alone learn Python")
        right.legend()

    picture(path, fill, panels=2, width=12)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a language model that is split over two workers.")
    parser.add_argument("--pretrain", type=int, default=200, help="steps on English, of the whole model")
    parser.add_argument("--steps", type=int, default=120, help="steps on Python, of the adapters")
    parser.add_argument("--blocks", type=int, default=2, help="of each stage")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--write", type=int, default=120, help="letters, before and after")
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with telegrad.local_cluster(names=["main", *STAGES]):
        model = Model(options.blocks)
        losses, _ = model.train(english(), options.pretrain, 2e-3, "pretraining")
        before = model.write("    def ", options.write)
        for stage in model.stages:
            stage.rpc_sync().adapt(options.rank)
        sizes = [stage.rpc_sync().sizes() for stage in model.stages]
        learnt, there = (sum(column) for column in zip(*sizes, strict=True))
        _, held_out = model.train(python(), options.steps, 4e-3, "fine-tuning")
        after = model.write("    def ", options.write)
    draw(options.output / "finetune.png", losses, held_out)
    for when, text in (("before", before), ("after", after)):
        print(f"--- what it writes {when} ---\n{text}\n")
    print(f"{learnt:,} of {there:,} numbers were learnt ({learnt / there:.1%})")
    print(f"loss {held_out[0]:.3f} -> {held_out[-1]:.3f}")


if __name__ == "__main__":
    main()
