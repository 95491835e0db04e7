"""Training under kill -9: whoever dies, whenever, the end is that of a run that nobody disturbed, bit for bit."""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.durable.job import Killer, job
from tests.durable.program import train


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Equal in every bit, types and order included."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key, value in one.items():
            assert_equal(value, other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            assert_equal(value, other[index], f"{where}[{index}]")
    else:
        assert one == other, where


def undisturbed(folder: Path, **settings: Any) -> Any:
    """What a run leaves that nobody disturbs."""
    with job(folder, train, **settings) as made:
        assert made.until(lambda: made.done, 200)
        assert made.deaths == 0
        return made.result()


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_weights_after_kills_are_those_of_an_undisturbed_run(tmp_path: Path, long_profile: bool) -> None:
    steps, strikes = (300, 60) if long_profile else (30, 5)
    seed = int(os.environ.get("TELEGRAD_CHAOS_SEED", str(time.time_ns() % 2**32 if long_profile else 21)))
    expected = undisturbed(tmp_path, steps=steps)
    assert expected["losses"][steps - 1] < expected["losses"][0]
    with job(tmp_path, train, steps=steps, pause=0.03) as made:
        killer = Killer(made, random.Random(seed))
        try:
            while made.deaths < strikes and not made.done:
                killer.strike()
            assert made.until(lambda: made.done, 200), f"stuck at {made.mark()}"
        except BaseException as error:
            error.add_note(f"seed {seed}, {made.deaths} deaths: {killer.kinds}")
            raise
        print(f"seed {seed}: {made.deaths} deaths by {killer.kinds}")
        assert made.deaths >= min(strikes, 3)
        assert_equal(made.result(), expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long  # a run on torchrun (tests/engines) goes on from disk as well
def test_a_whole_job_goes_on_from_disk(tmp_path: Path) -> None:
    settings = {"steps": 24, "every": 2, "disk_every": 4}
    expected = undisturbed(tmp_path, **settings)
    directory = tmp_path / "snapshots"
    with job(tmp_path, train, directory=directory, pause=0.03, **settings) as made:
        assert made.until(lambda: bool(list(directory.glob("training/*/whole.json"))), 120)
        for each in made.processes.values():
            each.kill()
    assert not made.done
    with job(tmp_path, train, directory=directory, **settings) as again:
        assert again.until(lambda: again.done, 200)
        assert_equal(again.result(), expected)
    newest = max(int(whole.parent.name.partition(".")[0]) for whole in directory.glob("training/*/whole.json"))
    assert newest == 24
