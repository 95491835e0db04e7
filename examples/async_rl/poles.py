"""The world: carts that are pushed left and right so that the poles on them do not fall."""

import math

import torch
from torch import Tensor

LONGEST = 200  # moves in an episode


class Poles:
    """Carts with poles on them, all moved at once. One that falls, or leaves the track, begins anew."""

    def __init__(self, count: int, seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        self.state = self._new(count)  # place, speed, angle, turning speed
        self.age = torch.zeros(count)

    def _new(self, count: int) -> Tensor:
        return torch.rand(count, 4, generator=self.chance) * 0.1 - 0.05

    def step(self, actions: Tensor) -> tuple[Tensor, list[int]]:
        """Push left (0) or right (1) for 1/50 s; which episodes are over, and how long they were."""
        _, speed, angle, turning = self.state.unbind(1)
        push = 20.0 * actions - 10.0
        swing = (push + 0.05 * turning**2 * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * swing) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        moved = (speed, swing - 0.05 * turn * angle.cos() / 1.1, turning, turn)
        self.state = self.state + 0.02 * torch.stack(moved, 1)
        self.age += 1
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12))
        over = fallen | (self.age >= LONGEST)
        lengths = self.age[over].int().tolist()
        self.state[over], self.age[over] = self._new(int(over.sum())), 0.0
        return over, lengths
