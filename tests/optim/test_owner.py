"""The owner's side of an optimizer, with no worker around it."""

import threading
from dataclasses import dataclass

import torch

from telegrad.engine.local import claims
from telegrad.optim.owner import LocalOptimizer
from telegrad.optim.shares import GroupShare
from tests.waiting import wait_until


@dataclass(frozen=True)
class Here:
    """Stands for a reference to a parameter of this worker."""

    param: torch.Tensor

    def local_value(self) -> torch.Tensor:
        return self.param


def share(group: int, param: torch.Tensor) -> GroupShare:
    return GroupShare(group, (group,), (Here(param),), {})


def test_a_group_that_is_added_while_a_step_waits_is_not_stepped_with_a_gradient_of_others() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    second.grad = torch.ones(2)  # whoever else uses it has left it there
    local = LocalOptimizer(torch.optim.SGD, [share(0, first)], True, (), {"lr": 1.0})
    step = threading.Thread(target=local.step, args=(None, 1.0, None))
    with claims.claimed([local, first]):
        step.start()
        wait_until(lambda: bool(claims._waiting))
        local.add(share(1, second))
    step.join(60)
    assert not claims._holders
    assert second.tolist() == [1.0, 1.0]
    assert second.grad.tolist() == [1.0, 1.0]
