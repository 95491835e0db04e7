"""Training while its workers are killed: the bar goes back a little each time, and the weights come out the same.

A network over two workers learns; a thread kills one of them by SIGKILL now and then, whatever it is doing. The run is
then made again with nobody disturbed, and both are compared bit for bit.

    python examples/survive.py --steps 300 --kills 6
"""

import argparse
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from showing import BLUE, RED, Bar, picture
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import telegrad
from telegrad import autograd, durable
from telegrad.launch import Cluster

Losses = dict[int, float]
Death = tuple[float, str]  # how many steps were done, and who died


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Two spirals, by the number of the step: a step that runs again sees the same."""
    chance = torch.Generator().manual_seed(number)
    turn = 3 * torch.rand(128, generator=chance)
    side = torch.randint(0, 2, (128,), generator=chance)
    angle = 2 * turn + torch.pi * side
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1)
    return points + 0.1 * torch.randn(128, 2, generator=chance), side.float()


def stem() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU())


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))


def train(cluster: Cluster, steps: int, kills: int, seed: int) -> tuple[Losses, list[Tensor], list[Death]]:
    """One whole run; the loss of each step, the weights, and who died."""
    run = durable.Run("spirals", every=5, seed=0)
    parts = [run.module("worker1", stem), run.module("worker2", head)]
    optimizer = run.optimizer(torch.optim.Adam, parts, lr=1e-3)
    schedule = run.keep(OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps))
    losses: Losses = {}
    deaths: list[Death] = []
    with Bar(steps) as bar, killer(cluster, run, kills, steps, seed, deaths) as await_killer:
        for number in run.steps(steps):
            if number == steps - 1:
                await_killer()  # behind the last step nobody would wait for the return of a worker
            with run.step() as context_id:
                points, side = batch(number)
                guess = parts[1](parts[0](points)).squeeze(1)
                loss = nn.functional.binary_cross_entropy_with_logits(guess, side)
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
                schedule.step()
                losses[number] = loss.item()  # by its number: a step that runs again writes the same
            # The bar goes back when the run does.
            bar.show(run.completed + 1, f"loss {losses.get(number, math.nan):.3f}  {len(run.returns)} deaths")
    weights = [weight for part in parts for weight in part.state_dict().values()]
    run.close()
    return losses, weights, deaths


@contextmanager
def killer(
    cluster: Cluster, run: durable.Run, kills: int, steps: int, seed: int, deaths: list[Death]
) -> Iterator[Callable[[], None]]:
    """While the block runs, kill a worker at random each time the run has come so far. What it gives waits for the next
    kill, if one is left."""
    over = threading.Event()
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(1, steps - 1), kills))

    def kill() -> None:
        for moment in moments:
            while run.completed < moment or len(run.returns) < len(deaths):
                if over.wait(0.001):
                    return
            time.sleep(chance.uniform(0, 0.01))
            victim, step = chance.choice(cluster.others), run.completed
            cluster.kill(victim)
            deaths.append((step, victim))

    def await_kill() -> None:
        while thread.is_alive() and len(deaths) < kills and len(run.returns) >= len(deaths):
            time.sleep(0.001)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield await_kill
    finally:
        over.set()
        thread.join()


def draw(losses: Losses, deaths: list[Death], path: Path) -> None:
    """The loss over the steps, and a line for each death."""

    def fill(axes: Any) -> None:
        axes.plot(list(losses), list(losses.values()), linewidth=1, color=BLUE)
        for step, victim in deaths:
            axes.axvline(step, color=RED, linewidth=0.8, alpha=0.7)
            axes.annotate(victim, (step, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7)
        axes.set(xlabel="step", ylabel="loss", title=f"{len(deaths)} workers were killed on the way")

    picture(path, fill)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the killer")
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    given = parser.parse_args()
    with telegrad.local_cluster(workers=3, restart=True) as cluster:
        losses, weights, deaths = train(cluster, given.steps, given.kills, given.seed)
        _, undisturbed, _ = train(cluster, given.steps, 0, 0)
    draw(losses, deaths, given.output / "survive.png")
    same = all(torch.equal(one, other) for one, other in zip(weights, undisturbed, strict=True))
    print(f"{len(deaths)} deaths; every bit as in an undisturbed run: {same}")
    print(f"loss {losses[0]:.3f} -> {losses[given.steps - 1]:.3f}")


if __name__ == "__main__":
    main()
