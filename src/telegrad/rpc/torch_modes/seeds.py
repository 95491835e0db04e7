"""Random numbers of all workers from one seed: `local_cluster(seed=...)` and `telegrad run --seed`.

Each worker draws numbers of its own: its rank is added to the seed. `torch.manual_seed` on the caller reaches nobody
else, as it would not in any job of several processes.
"""

import os
import random
import sys

import torch

VARIABLE = "TELEGRAD_SEED"


def seed_all(seed: int, rank: int) -> None:
    """Seed torch, `random` and, if it is in use, NumPy's global generator."""
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((seed + rank) % 2**32)


def seed_from_environment() -> None:
    """In a process that `telegrad run --seed` started: when Telegrad is imported, before the script makes anything."""
    seed = os.environ.get(VARIABLE)
    if seed is not None:
        seed_all(int(seed), int(os.environ.get("RANK", "0")))
