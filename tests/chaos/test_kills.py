"""Random programs while random workers are killed or stopped: right gradients or `WorkerDied`, and nothing left behind.

Each round runs programs of the oracle one after the other and harms a worker at a random moment. Each program must
leave what one process leaves, or fail within seconds of the harm with a `WorkerDied` that names the victim in its
very incarnation. The victim is then replaced, and everyone goes on. In the end no worker has more than when all began.
"""

import collections
import os
import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from telegrad import rpc
from telegrad.errors import WorkerDied
from tests.chaos.harm import Harm, HarmedCluster, belongings, harmed_cluster
from tests.oracle import interpreter
from tests.oracle.interpreter import Outcome
from tests.oracle.program import Program, script
from tests.oracle.strategy import MOST_WORKERS, programs

NOTICED_SECONDS = 40.0  # on a busy machine; what is not noticed takes a minute
WARM_UP = 3  # rounds after which the number of threads and descriptors has settled
SPARE = 8  # threads and descriptors that come and go
EMPTY = ("open shared memory", "mapped shared memory", "requests", "overdue", "contexts", "passes", "references")
Supply = list[tuple[Program, Outcome]]


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


def leftovers(made: HarmedCluster, before: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """The most that any worker has, and what is too much of it, once all have had a moment to end what they did."""
    deadline = time.monotonic() + 60
    while True:
        found = {name: rpc.rpc_sync(name, belongings) for name in made.names}
        too_much = [
            f"{name}: {had[what]} {what}, {limit} at most"
            for name, had in found.items()
            for what, limit in [
                *((what, before[what] + SPARE) for what in ("descriptors", "threads")),
                *((what, made.size) for what in ("sessions", "links")),
                *((what, 0) for what in EMPTY),
            ]
            if had[what] > limit
        ]
        if not too_much or time.monotonic() > deadline:
            return most_of(found.values()), too_much
        time.sleep(0.05)


def most_of(found: Iterable[dict[str, int]]) -> dict[str, int]:
    """The largest of each figure."""
    most: collections.Counter[str] = collections.Counter()
    for each in found:
        most |= collections.Counter({what: count + 1 for what, count in each.items()})  # `|` would drop zeros
    return {what: count - 1 for what, count in most.items()}


def check_blame(harm: Harm, error: WorkerDied, seconds: float) -> None:
    """An error is right if it names the victim, soon, and there is one."""
    assert harm.is_fatal, f"{harm} is no death: {error}"
    blamed = (error.worker, error.incarnation)
    assert blamed == (harm.victim, harm.incarnation), f"{harm} was blamed on {blamed}: {error}"
    assert seconds < NOTICED_SECONDS, f"{harm} was noticed after {seconds:.1f} s: {error}"


class Tally:
    """What came of all programs."""

    def __init__(self) -> None:
        self.right = 0
        self.died = 0
        self.longest = 0.0  # from a harm to its error

    def __repr__(self) -> str:
        programs = self.right + self.died
        return (
            f"{programs} programs: {self.right} right, {self.died} WorkerDied, the latest {self.longest:.2f} s after "
            "the harm"
        )


def one_round(supply: Supply, harm: Harm, tally: Tally) -> None:
    """Run programs while a worker is harmed, and a few after that; counts what came of each."""
    with harm:
        after = 0
        while after < 3:
            program, expected = supply.pop(0)
            supply.append((program, expected))
            began = time.monotonic()
            after += began > harm.done_at
            try:
                outcome = interpreter.distributed(program)
            except WorkerDied as error:
                seconds = time.monotonic() - max(began, harm.done_at)  # one that begins later cannot fail earlier
                check_blame(harm, error, seconds)
                tally.died += 1
                tally.longest = max(tally.longest, seconds)
                return
            difference = interpreter.differences(outcome, expected)
            assert not difference, f"{harm}:\n{script(program)}\n" + "\n".join(difference)
            tally.right += 1


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_kills(long_profile: bool) -> None:
    kills = int(os.environ.get("TELEGRAD_CHAOS_KILLS", "500" if long_profile else "10"))
    seed = int(os.environ.get("TELEGRAD_CHAOS_SEED", str(time.time_ns() % 2**32 if long_profile else 1)))
    chance = random.Random(seed)
    found = some_programs(400 if long_profile else 60, seed)
    supply = [(program, interpreter.in_one_process(program)) for program in found]
    tally = Tally()
    done = 0
    with harmed_cluster(MOST_WORKERS) as made:
        before = most_of(rpc.rpc_sync(name, belongings) for name in made.names)
        while done < kills:
            harm = Harm(made, chance)
            try:
                one_round(supply, harm, tally)
            except BaseException as error:
                error.add_note(f"seed {seed}, after {done} deaths: {harm}; {tally}")
                raise
            if harm.is_fatal:
                done += 1
                made.start_again(harm.victim)
            if done <= WARM_UP:
                before = most_of([before, *(rpc.rpc_sync(name, belongings) for name in made.names)])
        for name in made.names:
            rpc.rpc_sync(name, forget_runs)
        after, too_much = leftovers(made, before)
    print(f"seed {seed}: {kills} deaths; {tally}; before {before}, after {after}")
    assert not too_much
    assert tally.right and tally.died
