"""Training a model split over three workers gives the parameters that one process gives."""

from collections.abc import Iterator

import pytest
import torch
from torch.optim import lr_scheduler

from telegrad import autograd
from telegrad.nn import remote_parameters, state_dict
from telegrad.optim import DistributedOptimizer
from tests.training_cluster import cluster, local_model, loss_of, split_model

STEPS = 50
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(tmp_path_factory.mktemp("job")):
        yield


@pytest.mark.parametrize("clipping", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_equals_whole(name: str, scheduled: bool, clipping: float | None) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    split, whole = split_model(), local_model()
    distributed = DistributedOptimizer(optimizer_class, remote_parameters(split), **options)
    local = optimizer_class(whole.parameters(), **options)
    schedulers = [lr_scheduler.StepLR(each, step_size=7, gamma=0.5) for each in (distributed, local) if scheduled]

    for number in range(STEPS):
        with autograd.context() as context_id:
            loss = loss_of(split, number)
            autograd.backward(context_id, [loss])
            norm = distributed.step(context_id, max_norm=clipping)
        local.zero_grad()
        expected = loss_of(whole, number)
        expected.backward()
        if clipping is not None:
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), clipping))
        local.step()
        assert torch.equal(loss.detach(), expected.detach()), f"step {number}"
        for scheduler in schedulers:
            scheduler.step()

    trained = state_dict(split)
    for key, value in whole.state_dict().items():
        assert torch.equal(trained[key], value), key
