"""A WGAN with a gradient penalty, whose critic lives on another worker.

The penalty asks that the gradient of the critic's score has length one, so learning it takes a gradient of that
gradient, which runs through the calls to the critic twice.

    python examples/wgan_gp.py --steps 200
"""

import argparse
import math

import torch
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


def run(steps: int, lr: float, batch: int = 128) -> tuple[float, float]:
    """How far the generator's points are from the circle, before and after."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    critic = RemoteModule("worker1", Critic)
    critic_optimizer = DistributedOptimizer(torch.optim.Adam, critic.remote_parameters(), lr=lr, betas=(0.5, 0.9))
    optimizer = torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.9))
    noise = torch.randn(512, 2, generator=data)
    before = distance_to_circle(generator(noise).detach())
    for _ in range(steps):
        for _ in range(CRITIC_STEPS):
            truth = real(batch, data)
            made = generator(torch.randn(batch, 2, generator=data)).detach()
            between = torch.lerp(truth, made, torch.rand(batch, 1, generator=data)).requires_grad_()
            with autograd.context() as context_id:
                (slope,) = autograd.grad(context_id, [critic(between).sum()], [between], create_graph=True)
                penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
                loss = critic(made).mean() - critic(truth).mean() + PENALTY * penalty
                autograd.backward(context_id, [loss])
                critic_optimizer.step(context_id)
        with autograd.context() as context_id:
            made = generator(torch.randn(batch, 2, generator=data))
            autograd.backward(context_id, [-critic(made).mean()])
            found = autograd.get_gradients(context_id)
            for parameter in generator.parameters():
                parameter.grad = found[parameter]
            optimizer.step()
    return before, distance_to_circle(generator(noise).detach())


def main() -> None:
    parser = argparse.ArgumentParser(description="A WGAN with a gradient penalty, with the critic on another worker.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.002)
    options = parser.parse_args()
    with telegrad.local_cluster(workers=2):
        before, after = run(options.steps, options.lr)
    print(f"distance to the circle {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main()
