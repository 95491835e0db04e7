"""A WGAN with a gradient penalty, whose critic lives on another worker.

The penalty asks that the gradient of the critic's score has length one, so learning it takes a gradient of that
gradient, which runs through the calls to the critic twice.

    python examples/wgan_gp.py --steps 200
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from showing import BLUE, GREY, RED, Bar, curves, picture
from torch import Tensor, nn

import telegrad
from telegrad import autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

CRITIC_STEPS = 3
PENALTY = 1.0


class Critic(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))


def real(count: int, data: torch.Generator) -> Tensor:
    """Points on a circle, with a little noise."""
    angle = torch.rand(count, generator=data) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1) * 2 + 0.05 * torch.randn(count, 2, generator=data)


def distance_to_circle(points: Tensor) -> float:
    return float((points.norm(dim=1) - 2).abs().mean())


class Game:
    """A generator here, a critic on worker1, and an optimizer for each."""

    def __init__(self, lr: float, batch: int) -> None:
        torch.manual_seed(0)
        self.data = torch.Generator().manual_seed(0)
        self.batch = batch
        self.generator = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        self.critic = RemoteModule("worker1", Critic)
        weights = self.critic.remote_parameters()
        self.critic_optimizer = DistributedOptimizer(torch.optim.Adam, weights, lr=lr, betas=(0.5, 0.9))
        self.optimizer = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(0.5, 0.9))

    def make(self) -> Tensor:
        made: Tensor = self.generator(torch.randn(self.batch, 2, generator=self.data))
        return made

    def improve_critic(self) -> None:
        truth, made = real(self.batch, self.data), self.make().detach()
        between = torch.lerp(truth, made, torch.rand(self.batch, 1, generator=self.data)).requires_grad_()
        with autograd.context() as context_id:
            (slope,) = autograd.grad(context_id, [self.critic(between).sum()], [between], create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            loss = self.critic(made).mean() - self.critic(truth).mean() + PENALTY * penalty
            autograd.backward(context_id, [loss])
            self.critic_optimizer.step(context_id)

    def improve_generator(self) -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [-self.critic(self.make()).mean()])
            found = autograd.get_gradients(context_id)
            for parameter in self.generator.parameters():
                parameter.grad = found[parameter]
            self.optimizer.step()


def run(steps: int, lr: float, batch: int = 128) -> tuple[list[float], Tensor, Tensor]:
    """How far the generator's points are from the circle along the way; its points before and after."""
    game = Game(lr, batch)
    noise = torch.randn(512, 2, generator=game.data)
    before = game.generator(noise).detach()
    distances = [distance_to_circle(before)]
    with Bar(steps) as bar:
        for number in range(1, steps + 1):
            for _ in range(CRITIC_STEPS):
                game.improve_critic()
            game.improve_generator()
            distances.append(distance_to_circle(game.generator(noise).detach()))
            bar.show(number, f"distance to the circle {distances[-1]:.3f}")
    return distances, before, game.generator(noise).detach()


def draw(path: Path, distances: list[float], before: Tensor, after: Tensor) -> None:
    def fill(left: Any, right: Any) -> None:
        curves(left, {"": distances}, "step", "mean distance", "The generator's points come to the circle")
        for points, colour, label in ((before, GREY, "before"), (after, BLUE, "after")):
            right.scatter(points[:, 0], points[:, 1], s=6, color=colour, label=label)
        angle = torch.linspace(0, 2 * math.pi, 200)
        right.plot(2 * angle.cos(), 2 * angle.sin(), color=RED, lw=1, label="the circle")
        right.set(aspect="equal", title="What it makes of noise")
        right.legend(loc="upper left", bbox_to_anchor=(1, 1))

    picture(path, fill, panels=2, width=11)


def main() -> None:
    parser = argparse.ArgumentParser(description="A WGAN with a gradient penalty, with the critic on another worker.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    with telegrad.local_cluster(workers=2):
        distances, before, after = run(options.steps, options.lr)
    draw(options.output / "wgan_gp.png", distances, before, after)
    print(f"distance to the circle {distances[0]:.3f} -> {distances[-1]:.3f}")


if __name__ == "__main__":
    main()
