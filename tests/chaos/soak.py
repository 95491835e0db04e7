"""A soak: eight workers under mixed load for as long as is asked; memory stays flat and nothing fails.

    python -m tests.chaos.soak --minutes 30

Every worker calls the others: small calls, large tensors, futures, references, and backward passes over three workers.
The first third warms up, until every size of block has been used between every two workers; after that the resident
memory of each process stays where it is.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry
from tests.cluster import Cluster, end

SIZE = 8
ALLOWED_GROWTH = 64 * 2**20  # bytes in one process, over the whole soak after the warm-up: allocators settle slowly

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
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def contexts() -> int:
    return len(registry())


def soak(minutes: float) -> int:
    """Run; the number of rounds. AssertionError, or any other error, if something is wrong."""
    with tempfile.TemporaryDirectory(prefix="telegrad-test-") as folder:
        made = Cluster(SIZE, Path(folder))
        graceful = False
        try:
            first = minutes * 60 / 3
            rounds = _all(made.names, first, seed=1)
            before = {name: rpc.rpc_sync(name, resident) for name in made.names}
            rounds += _all(made.names, minutes * 60 - first, seed=2)
            after = {name: rpc.rpc_sync(name, resident) for name in made.names}
            for name in made.names:
                print(f"{name}: {before[name] / 2**20:.0f} MB, then {after[name] / 2**20:.0f} MB")
                assert after[name] - before[name] < ALLOWED_GROWTH, f"the memory of {name} grew"
                deadline = time.monotonic() + 10
                while rpc.rpc_sync(name, contexts):
                    assert time.monotonic() < deadline, f"contexts are left on {name}"
                    time.sleep(0.01)
            graceful = True
        finally:
            rpc.shutdown(graceful=graceful, timeout=30)
            end(made.processes, patience=10 if graceful else 0)
    return rounds


def _all(names: list[str], seconds: float, seed: int) -> int:
    futures_ = [
        rpc.rpc_async(name, load, args=(names, seed * 100 + rank, seconds), timeout=0)
        for rank, name in enumerate(names)
    ]
    return sum(future.wait() for future in futures_)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    given = parser.parse_args()
    print(f"{soak(given.minutes)} rounds in {given.minutes:g} minutes")
    sys.exit(0)
