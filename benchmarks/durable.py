"""What it costs that a run survives: steps of 50 ms on two workers of one host, with and without durable values.

    python -m benchmarks.durable [--megabytes 64] [--every 10] [--step 50]

The driver and one other worker each compute for half of every step, and hold half of the state. Rounds of plain steps
and of durable ones alternate. Also: what is waited for when a snapshot is taken (each worker copies its state aside),
and how long a return takes once the lost worker is back.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn

import telegrad
from telegrad import autograd, durable, rpc

ROUNDS, STEPS = 7, 40


class Half(nn.Module):
    """Half of the state, and work for half of a step."""

    def __init__(self, megabytes: float, multiplications: int) -> None:
        super().__init__()
        count = 16  # tensors of a usual size
        self.weights = nn.ParameterList(torch.zeros(int(megabytes * 2**20 / 4 / count)) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(1))
        self.work = torch.randn(256, 256)
        self.multiplications = multiplications

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute(self.work, self.multiplications)
        return x * self.scale


def compute(work: torch.Tensor, multiplications: int) -> None:
    """Keep a core busy."""
    for _ in range(multiplications):
        work @ work


def multiplications_for(seconds: float) -> int:
    """How many take so long."""
    work = torch.randn(256, 256)
    compute(work, 200)
    began = time.perf_counter()
    compute(work, 1000)
    return max(1, round(seconds / ((time.perf_counter() - began) / 1000)))


def one_step(halves: list[nn.Module], context_id: int) -> None:
    x = torch.ones(1)
    for half in halves:
        x = half(x)
    autograd.backward(context_id, [x.sum()])


def plain_steps(halves: list[nn.Module]) -> float:
    began = time.perf_counter()
    for _ in range(STEPS):
        with autograd.context() as context_id:
            one_step(halves, context_id)
    return (time.perf_counter() - began) / STEPS


def durable_steps(halves: list[nn.Module], run: durable.Run, steps: Iterator[int]) -> tuple[float, float]:
    """Seconds a step, and the longest time between two of them."""
    began = time.perf_counter()
    longest = 0.0
    for _ in range(STEPS):
        between = time.perf_counter()
        next(steps)
        longest = max(longest, time.perf_counter() - between)
        with run.step() as context_id:
            one_step(halves, context_id)
    return (time.perf_counter() - began) / STEPS, longest


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of surviving")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of state, half of it on each worker")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--step", type=float, default=50.0, help="milliseconds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = multiplications_for(given.step / 2000)
    arguments = (given.megabytes / 2, work)
    with telegrad.local_cluster(workers=2, threads=1, restart=True, show_output=False) as cluster:
        run = durable.Run("benchmark", every=given.every)
        halves = [run.module(name, Half, arguments) for name in cluster.names]
        steps = run.steps(10**9)
        durable_steps(halves, run, steps)  # memory is touched, links are made
        plain, kept, longest = [], [], []
        for _ in range(ROUNDS):
            plain.append(plain_steps(halves))
            seconds, between = durable_steps(halves, run, steps)
            kept.append(seconds)
            longest.append(between)
        off, on = statistics.median(plain), statistics.median(kept)
        print(f"{given.megabytes:g} MB of state on two workers, a snapshot every {given.every} steps, one copy")
        print(f"  plain step     {off * 1e3:7.2f} ms")
        print(f"  durable step   {on * 1e3:7.2f} ms, {on / off - 1:+.1%}")
        print(f"  snapshot       {statistics.median(longest) * 1e3:7.2f} ms waited for")
        cluster.kill("worker1")
        rpc.rpc_sync("worker1", abs, (0,), retries=1)
        with run.step():
            halves[1](torch.ones(1))
        next(steps)
        back = run.returns[-1]
        print(f"  return         {back.seconds * 1e3:7.0f} ms after the worker was back, to {back.to_step} steps")
        steps.close()  # a generator
        run.close()


if __name__ == "__main__":
    main()
