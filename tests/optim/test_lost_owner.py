"""An owner that is gone stops nobody else: the others are asked all the same, and the error says what they did."""

import os
from pathlib import Path

import pytest
import torch

from telegrad import rpc
from telegrad.errors import WorkerDied
from telegrad.optim import DistributedOptimizer
from tests.training_cluster import end, start

pytestmark = pytest.mark.slow


class DiesOnASecondGroup(torch.optim.SGD):
    def add_param_group(self, param_group: dict[str, object]) -> None:
        if getattr(self, "param_groups", None) and rpc.get_worker_info().name == "ps1":
            os._exit(1)
        super().add_param_group(param_group)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def groups(local: rpc.RRef) -> int:
    return len(local.local_value().optimizer.param_groups)


def test_the_others_are_asked_all_the_same(tmp_path: Path) -> None:
    processes = start(tmp_path, ("ps0", "ps1"))
    try:
        first, second, third, fourth = [rpc.remote(owner, parameter) for owner in ("ps0", "ps1") * 2]
        optimizer = DistributedOptimizer(DiesOnASecondGroup, [first, second], lr=0.5)
        with pytest.raises(WorkerDied, match="ps1"):
            optimizer.add_param_group({"params": [third, fourth]})
        assert rpc.rpc_sync("ps0", groups, args=(optimizer.remote_optimizers[0],)) == 1  # taken back
        with pytest.raises(WorkerDied, match="ps1") as raised:
            optimizer.step()
        assert "the optimizer step was completed on 'ps0'" in raised.value.__notes__
    finally:
        rpc.shutdown(graceful=False)
        for each in processes:
            each.kill()
        end(processes)
