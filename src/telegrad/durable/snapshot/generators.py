"""The random generators that belong to a process: torch's, on each of its devices, Python's and numpy's."""

import random
import sys
import zlib
from typing import Any

import torch


def save_generators() -> dict[str, Any]:
    """Their states, in plain values and tensors. Those that were never used here (CUDA's, numpy's) are left out."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch does not say
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (kind, key.tolist(), int(position), int(has_gauss), float(gauss))
    return state


def load_generators(state: dict[str, Any]) -> None:
    """Put them back."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy  # noqa: PLC0415 - only where the state came from a process that has it

        numpy.random.set_state(state["numpy"])


def seed_generators(seed: int, worker: str) -> None:
    """Give a worker a seed of its own, the same each time."""
    own = (seed + zlib.crc32(worker.encode())) % 2**32
    torch.manual_seed(own)
    random.seed(own)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(own)
