"""A soak: eight workers under mixed load for as long as is asked; memory stays flat and nothing fails.

    python -m tests.chaos.soak --minutes 30

Every worker calls the others: small calls, large tensors, futures, references, and backward passes over three workers.
The first third warms up. Then all rest, until the memory that tensors travelled in has been returned, and after the
other two thirds they rest again: what each process then holds is what it held before. Under load its memory varies with
what the last seconds brought, so there the second half is compared with the first by their medians.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry
from telegrad.rpc.futures import Future
from tests.cluster import Cluster, end

SIZE = 8
MB = 2**20
ALLOWED_GROWTH = 24 * MB  # in one process, over the whole soak after the warm-up: allocators settle slowly
ALLOWED_UNDER_LOAD = 64 * MB  # a machine that is quicker for a while uses more blocks at once
REST_SECONDS = 60.0
SAMPLE_SECONDS = 2.0

_weight = torch.full((64,), 2.0, requires_grad=True)


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


def scale(x: torch.Tensor, then: list[str]) -> torch.Tensor:
    y = x * _weight
    return rpc.rpc_sync(then[0], scale, args=(y, then[1:])) if then else y


def small(names: list[str], chance: random.Random) -> None:
    assert rpc.rpc_sync(chance.choice(names), torch.add, args=(torch.ones(2), 1)).tolist() == [2.0, 2.0]


def large(names: list[str], chance: random.Random) -> None:
    value = torch.full((chance.randrange(1, 2**19),), 7.0)
    assert torch.equal(rpc.rpc_sync(chance.choice(names), echo, args=(value,)), value)


def futures(names: list[str], chance: random.Random) -> None:
    asked = [rpc.rpc_async(chance.choice(names), torch.add, args=(i, 1)) for i in range(20)]
    assert [each.wait() for each in asked] == list(range(1, 21))


def references(names: list[str], chance: random.Random) -> None:
    held = rpc.remote(chance.choice(names), torch.ones, args=(64,))
    further = rpc.remote(chance.choice(names), scale, args=(held.to_here(), []))
    assert further.to_here()[0] == 2.0


def step(names: list[str], chance: random.Random) -> None:
    path = chance.sample(names, 2)
    with autograd.context() as context_id:
        x = torch.ones(64, requires_grad=True)
        y = rpc.rpc_sync(path[0], scale, args=(x, path[1:]))
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].eq(4).all()


def load(names: list[str], seed: int, seconds: float) -> int:
    """What each worker does, all at once; how many rounds."""
    chance = random.Random(seed)
    deadline = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < deadline:
        chance.choice([small, large, futures, references, step])(names, chance)
        rounds += 1
    return rounds


def resident() -> int:
    """Bytes of memory of this process."""
    return _status("VmRSS")


def shared() -> int:
    """Bytes of them that it shares with others: blocks that tensors travel in."""
    return _status("RssShmem")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def contexts() -> int:
    return len(registry())


def soak(minutes: float) -> int:
    """Run; the number of rounds. AssertionError, or any other error, if something is wrong."""
    with tempfile.TemporaryDirectory(prefix="telegrad-test-") as folder:
        made = Cluster(SIZE, Path(folder))
        graceful = False
        try:
            first = minutes * 60 / 3
            rounds, _ = _all(made.names, first, seed=1)
            before = at_rest(made.names)
            more, samples = _all(made.names, minutes * 60 - first, seed=2)
            after = at_rest(made.names)
            for name in made.names:
                _check(name, before[name], after[name], samples[name])
            graceful = True
        finally:
            rpc.shutdown(graceful=graceful, timeout=30)
            end(made.processes, patience=10 if graceful else 0)
    return rounds + more


def at_rest(names: list[str]) -> dict[str, int]:
    """The memory of each worker once it has returned what it does not use; contexts are over by then."""
    deadline = time.monotonic() + REST_SECONDS
    for name in names:
        while (left := (rpc.rpc_sync(name, shared), rpc.rpc_sync(name, contexts))) != (0, 0):
            assert time.monotonic() < deadline, f"{left} bytes of blocks and contexts are left on {name}"
            time.sleep(0.1)
    return {name: rpc.rpc_sync(name, resident) for name in names}


def _check(name: str, before: int, after: int, samples: list[int]) -> None:
    half = len(samples) // 2
    earlier, later = statistics.median(samples[:half]), statistics.median(samples[half:])
    print(
        f"{name}: at rest {before / MB:.0f} MB, then {after / MB:.0f} MB; "
        f"under load {earlier / MB:.0f} MB, then {later / MB:.0f} MB, {max(samples) / MB:.0f} MB at most"
    )
    assert after - before < ALLOWED_GROWTH, f"the memory of {name} grew"
    assert later - earlier < ALLOWED_UNDER_LOAD, f"the memory of {name} under load grew"


def _all(names: list[str], seconds: float, seed: int) -> tuple[int, dict[str, list[int]]]:
    """Load on all workers; the number of rounds, and what memory each had meanwhile."""
    loads: list[Future[int]] = [
        rpc.rpc_async(name, load, args=(names, seed * 100 + rank, seconds), timeout=0)
        for rank, name in enumerate(names)
    ]
    samples: dict[str, list[int]] = {name: [] for name in names}
    while not all(each.done() for each in loads):
        time.sleep(min(SAMPLE_SECONDS, seconds / 10))
        for name in names:
            samples[name].append(rpc.rpc_sync(name, resident))
    return sum(each.wait() for each in loads), samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    given = parser.parse_args()
    print(f"{soak(given.minutes)} rounds in {given.minutes:g} minutes")
    sys.exit(0)
