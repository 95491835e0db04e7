"""Gatherings of the stand-in, and its shutdown, do not wait for workers that are gone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad.compat.rpc.gathering import AllGatherStates
from telegrad.errors import WorkerDied

PROGRAM = Path(__file__).with_name("lost_worker.py")


def test_the_wait_is_over_when_all_have_come() -> None:
    states = AllGatherStates()
    states.arrived("a", 1)
    states.wait_for({"b", "c"}, without_dead=False)
    states.arrived("b", 2)
    assert not states.proceed_signal.is_set()
    states.arrived("c", 3)
    assert states.proceed_signal.is_set()
    assert states.gathered_objects == {"a": 1, "b": 2, "c": 3}
    assert states.failure is None


def test_what_comes_before_the_wait_does_not_end_it() -> None:
    states = AllGatherStates()
    states.arrived("b", 2)
    assert not states.proceed_signal.is_set()
    states.wait_for((), without_dead=False)
    assert states.proceed_signal.is_set()


def test_one_that_is_gone_ends_the_gathering_or_is_passed_over() -> None:
    strict, lenient = AllGatherStates(), AllGatherStates()
    strict.wait_for({"b", "c"}, without_dead=False)
    lenient.wait_for({"b", "c"}, without_dead=True)
    for states in (strict, lenient):
        states.lost("stranger")
        states.lost("b")
    assert isinstance(strict.failure, WorkerDied)
    assert strict.failure.worker == "b"
    assert strict.proceed_signal.is_set()
    assert not lenient.proceed_signal.is_set()
    lenient.lost("c")
    assert lenient.proceed_signal.is_set()
    assert lenient.failure is None


def test_one_that_goes_after_it_has_come_changes_nothing() -> None:
    states = AllGatherStates()
    states.wait_for({"b", "c"}, without_dead=False)
    states.arrived("b", 2)
    states.lost("b")
    states.arrived("c", 3)
    states.lost("c")
    assert states.proceed_signal.is_set()
    assert states.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_program_whose_worker_is_gone_hears_of_it_and_ends(dies: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "telegrad.compat", str(PROGRAM), str(dies), f"file://{tmp_path}/meeting"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    heard = sorted(re.findall(r"worker\d heard that worker\d is gone, and ended", done.stdout))
    assert heard == [f"worker{rank} heard that worker{dies} is gone, and ended" for rank in range(3) if rank != dies]
