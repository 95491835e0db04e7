"""Saving, killing every process and restoring in new ones continues the trajectory of one that never stopped."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from telegrad import autograd, rpc
from telegrad.nn import remote_parameters, restore, save, state_dict
from telegrad.optim import DistributedOptimizer
from tests.cluster import process
from tests.training_cluster import OWNERS, end, join_job, local_model, loss_of, serve, split_model

SAVED_AT, LAST = 10, 20


class Training:
    """The same training program before and after the crash."""

    def __init__(self) -> None:
        self.model = split_model()
        self.optimizer = DistributedOptimizer(torch.optim.AdamW, remote_parameters(self.model), lr=0.02)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=LAST)

    def run(self, first: int, last: int) -> None:
        for number in range(first, last):
            with autograd.context() as context_id:
                autograd.backward(context_id, [loss_of(self.model, number)])
                self.optimizer.step(context_id, max_norm=0.1)
            self.scheduler.step()

    def save(self, directory: Path) -> None:
        save(self.model, directory / "model.pt")
        progress = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        torch.save(progress, directory / "progress.pt")

    def restore(self, directory: Path) -> None:
        restore(self.model, directory / "model.pt")
        progress = torch.load(directory / "progress.pt", weights_only=True)
        self.scheduler.load_state_dict(progress["scheduler"])
        self.optimizer.load_state_dict(progress["optimizer"])


def train_and_save(directory: Path, report: Connection, *membership: Any) -> None:
    torch.set_num_threads(1)
    join_job(*membership)
    training = Training()
    training.run(0, SAVED_AT)
    training.save(directory)
    report.send("saved")
    training.run(SAVED_AT, 10**9)  # Until it is killed; what it learns from here on is lost.


def restore_and_train(directory: Path, report: Connection, *membership: Any) -> None:
    torch.set_num_threads(1)
    join_job(*membership)
    training = Training()
    training.restore(directory)
    training.run(SAVED_AT, LAST)
    report.send({key: value.tolist() for key, value in state_dict(training.model).items()})
    del training  # Its references to what the owners hold; a shutdown would report them.
    rpc.shutdown()


def run_job(program: Any, directory: Path) -> Any:
    """Run `program` as the trainer of a new job, all of whose processes are new; what it reports first."""
    meeting, world = str(directory / program.__name__), 1 + len(OWNERS)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    processes = [process(program, directory, theirs, "trainer", 0, world, meeting)]
    processes += [process(serve, name, rank, world, meeting) for rank, name in enumerate(OWNERS, start=1)]
    theirs.close()
    try:
        return ours.recv()
    finally:
        if program is train_and_save:
            for each in processes:
                each.kill()
        end(processes)
        ours.close()


@pytest.mark.slow
def test_a_killed_job_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    assert run_job(train_and_save, tmp_path) == "saved"
    trained = run_job(restore_and_train, tmp_path)

    whole = local_model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.02)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=LAST)
    for number in range(LAST):
        optimizer.zero_grad()
        loss_of(whole, number).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    for key, value in whole.state_dict().items():
        assert torch.equal(torch.tensor(trained[key]), value), key
