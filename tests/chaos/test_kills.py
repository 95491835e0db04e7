"""Random programs while random workers are killed or stopped: right gradients or `WorkerDied`, and nothing left behind.

Each round runs programs of the oracle one after the other and harms a worker at a random moment. Each program must
leave what one process leaves, or fail within three seconds of the harm with an error that names the victim. The victim
is then replaced, and everyone goes on.
"""

import collections
import os
import random
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from telegrad import rpc
from telegrad.autograd.registry import registry
from telegrad.errors import ContextFailed, WorkerDied
from tests.chaos.harm import Harm, belongings, harmed_cluster
from tests.oracle import interpreter
from tests.oracle.program import Program, script
from tests.oracle.strategy import MOST_WORKERS, programs

NOTICED_SECONDS = 3.0
WARM_UP = 3  # rounds after which the number of threads and descriptors has settled


def some_programs(count: int, seed: int) -> list[Program]:
    """Programs of the oracle's own strategy."""
    found: list[Program] = []

    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(programs())
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    found.sort(key=lambda program: -len(script(program)))  # the longer, the more there is to interrupt
    kept = found[: count // 2]
    random.Random(seed).shuffle(kept)
    return kept


def forget_runs() -> None:
    """Programs that failed left their leaves on the workers that lived."""
    interpreter._states.clear()


def tables_here() -> int:
    """Contexts of programs that are over."""
    return len(registry())


def until_empty(names: list[str]) -> None:
    deadline = time.monotonic() + 10
    while left := [name for name in names if rpc.rpc_sync(name, tables_here)]:
        assert time.monotonic() < deadline, f"contexts are left on {left}"
        time.sleep(0.01)


def check_blame(harm: Harm, error: Exception, seconds: float) -> None:
    """An error is right if it names the victim, soon, and there is one."""
    assert harm.is_fatal, f"{harm} is no death: {error}"
    assert harm.victim in str(error), f"{harm} was blamed on another: {error}"
    assert seconds < NOTICED_SECONDS, f"{harm} was noticed after {seconds:.1f} s"


def one_round(supply: list[Program], harm: Harm, came: collections.Counter[str]) -> None:
    """Run programs while a worker is harmed, and a few after that; counts what came of each."""
    with harm:
        after = 0
        while after < 3:
            program = supply.pop(0)
            supply.append(program)
            expected = interpreter.in_one_process(program)
            began = time.monotonic()
            after += began > harm.done_at
            try:
                outcome = interpreter.distributed(program)
            except (WorkerDied, ContextFailed) as error:
                check_blame(harm, error, time.monotonic() - max(began, harm.done_at))
                came[type(error).__name__] += 1
                return
            difference = interpreter.differences(outcome, expected)
            assert not difference, f"{harm}:\n{script(program)}\n" + "\n".join(difference)
            came["right gradients"] += 1


@pytest.mark.slow
@pytest.mark.chaos
def test_kills(long_profile: bool) -> None:
    kills = int(os.environ.get("TELEGRAD_CHAOS_KILLS", "500" if long_profile else "10"))
    seed = int(os.environ.get("TELEGRAD_CHAOS_SEED", str(time.time_ns() % 2**32 if long_profile else 1)))
    chance = random.Random(seed)
    supply = some_programs(400 if long_profile else 60, seed)
    came: collections.Counter[str] = collections.Counter()
    done = 0
    with harmed_cluster(MOST_WORKERS) as made:
        before = belongings()
        while done < kills:
            harm = Harm(made, chance)
            try:
                one_round(supply, harm, came)
            except BaseException as error:
                error.add_note(f"seed {seed}, after {done} kills: {harm}; {dict(came)}")
                raise
            if harm.is_fatal:
                done += 1
                made.start_again(harm.victim)
            if done <= WARM_UP:
                before = {key: max(value, before[key]) for key, value in belongings().items()}
        for name in made.names:
            rpc.rpc_sync(name, forget_runs)
        until_empty(made.names)
        after = belongings()
    print(f"seed {seed}: {kills} deaths, {dict(came)}; before {before}, after {after}")
    assert came["right gradients"] and came["WorkerDied"]
    assert after["pending"] == 0
    assert after["shared memory"] <= before["shared memory"] + 8
    for what in ("descriptors", "threads", "sessions", "links"):
        assert after[what] <= before[what] + 8, f"{what}: {before[what]} grew to {after[what]}"
