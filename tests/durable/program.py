"""The training that the tests kill: a model over three workers, with Adam, dropout, batch norm and a scheduler."""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from telegrad import autograd, durable
from tests.durable.job import at, mark, rest


class Probe:
    """Part of a module's state that notices when it is read, unpacked by whoever keeps it, and put back."""

    def __deepcopy__(self, _: Any) -> "Probe":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, ()


def _unpacked() -> Probe:
    at("keeping")
    return Probe()


class Block(nn.Module):
    """A layer with everything that has a state."""

    def __init__(self, inputs: int, outputs: int, final: bool = False, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.Identity() if final else nn.BatchNorm1d(outputs)
        self.dropout = nn.Dropout(0.0 if final else 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at("forward")
        y = self.dropout(self.norm(self.linear(x)))
        if y.requires_grad:
            y.register_hook(self.in_backward)
        return y

    def in_backward(self, _: torch.Tensor) -> None:
        at("backward")

    def get_extra_state(self) -> Probe | None:
        at("copying")
        return None if self.plain else Probe()  # a file takes only plain states

    def set_extra_state(self, _: Probe | None) -> None:
        at("restoring")


class Adam(torch.optim.Adam):
    """Adam, with a moment to die before and behind its step."""

    def step(self, closure: Any = None) -> Any:
        at("optimizer")
        result = super().step(closure)
        at("optimizer")
        return result


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data by the number of the step."""
    chance = torch.Generator().manual_seed(number)
    x = torch.randn(16, 12, generator=chance)
    return x, x[:, :3].sin().sum(1, keepdim=True)


def train(steps: int, copies: int = 2, every: int = 3, pause: float = 0.0, **given: Any) -> dict[str, Any]:
    """Train to the end; everything there is to compare."""
    plain = "directory" in given
    run = durable.Run("training", copies=copies, every=every, seed=7, restart_timeout=60, **given)
    blocks = [
        run.module("w1", Block, (12, 32, False, plain)),
        run.module("w2", Block, (32, 32, False, plain)),
        run.module("w3", Block, (32, 1, True, plain)),
    ]
    optimizer = run.optimizer(Adam, blocks, lr=0.02)
    scheduler = run.keep(CosineAnnealingLR(optimizer, steps))
    losses: dict[int, float] = run.keep({}, name="losses", save=dict, load=_load_losses)
    for number in run.steps(steps):
        with run.step() as context_id:
            x, wanted = batch(number)
            y = x * (1 + 0.1 * torch.rand(()))  # the driver's own generator
            for block in blocks:
                y = block(y)
            loss = (y - wanted).pow(2).mean()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id, max_norm=1.0)
            scheduler.step()
            losses[number] = loss.item()
            rest(pause)
        mark(f"{number} {len(run.returns)}")
    states = [{k: v for k, v in block.state_dict().items() if not k.endswith("_extra_state")} for block in blocks]
    result = {
        "losses": losses,
        "weights": states,
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.rand(3),
    }
    run.close()
    return result


def _load_losses(losses: dict[int, float], state: dict[int, float]) -> None:
    losses.clear()
    losses.update(state)
