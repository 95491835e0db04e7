"""Calls between the same two Ray actors, by Ray and by Telegrad: `python -m benchmarks.ray_actors`.

One actor calls the other, in turns, so that both ways see the same machine. Medians.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from telegrad import rpc
from telegrad.launch.ray import join

ROUNDS = 50
SIZES = {"empty": 0, "4 kB": 2**10, "4 MB": 2**20}  # floats


def echo(value: Any) -> Any:
    return value


@ray.remote(num_cpus=0.5)
class Peer:
    """A worker that can be called both ways."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        join(name)

    def echo(self, value: Any) -> Any:
        return value

    def measure(self, other: Any, name: str, floats: int) -> tuple[float, float]:
        """Microseconds by Ray and by Telegrad."""
        value = torch.ones(floats) if floats else None
        by_ray, by_telegrad = [], []
        for _ in range(ROUNDS):
            by_ray.append(_seconds(lambda: ray.get(other.echo.remote(value))))
            by_telegrad.append(_seconds(lambda: rpc.rpc_sync(name, echo, args=(value,))))
        return statistics.median(by_ray[5:]) * 1e6, statistics.median(by_telegrad[5:]) * 1e6


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    ray.init(num_cpus=2, logging_level="WARNING")
    first, second = Peer.remote("a"), Peer.remote("b")
    ray.get(second.echo.remote(None))
    print(f"{'echo of':<8} {'Ray':>12} {'Telegrad':>12}  ratio")
    for what, floats in SIZES.items():
        by_ray, by_telegrad = ray.get(first.measure.remote(second, "b", floats))
        print(f"{what:<8} {by_ray:>9.0f} us {by_telegrad:>9.0f} us  {by_ray / by_telegrad:.1f}x")
    ray.shutdown()


if __name__ == "__main__":
    main()
