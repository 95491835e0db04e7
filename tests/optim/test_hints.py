"""What people pass first, and what they are told to pass."""

import pytest
import torch
from torch import nn

from telegrad.nn import restore, save
from telegrad.optim import DistributedOptimizer


def test_a_model_in_place_of_the_class() -> None:
    with pytest.raises(TypeError, match=r"class of the optimizer.*remote_parameters\(model\)"):
        DistributedOptimizer(nn.Linear(1, 1))


def test_a_model_in_place_of_its_parameters() -> None:
    with pytest.raises(TypeError, match=r"not a model: pass `telegrad\.nn\.remote_parameters\(model\)`"):
        DistributedOptimizer(torch.optim.SGD, nn.Linear(1, 1), lr=0.1)


class Reference:
    def to_here(self) -> None: ...


@pytest.mark.parametrize("use", [save, restore])
def test_a_reference_in_place_of_a_model(use: object) -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module.*for a reference, wrap"):
        use(Reference(), "model.pt")
