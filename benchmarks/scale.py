"""What grows with the number of workers: messages, bytes and store requests, counted over all workers together.

    python -m benchmarks.scale 8 64 256 1000                 all agents in this process, over the memory transport
    python -m benchmarks.scale --processes 8 32 128 256      real worker processes, with times
    ... --save FOLDER                                        the counts, for the plot

Agents do what they do anywhere: join through a store, call, run a pass, meet at a barrier, idle, lose one, leave.
Counts have no noise, so a machine that could never run so many workers at speed can still say how their number enters.
"""

from __future__ import annotations

import argparse
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from benchmarks import scale_processes
from benchmarks.counting import KINDS, Counts, count_here
from telegrad import autograd, rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import set_current_agent
from telegrad.rpc.job.attendance import Attendance
from telegrad.rpc.job.barrier import barrier
from telegrad.rpc.job.join import start
from telegrad.rpc.job.lifecycle import wait_for_all

IDLE_SECONDS = 2.0
# So that nobody is asked whether it lives while 1,000 agents share one interpreter: how often that happens depends on
# how long the machine takes, and is counted by itself in real processes.
_HEARTBEAT = 120.0

Row = dict[str, list[float]]  # by event: the counts, and the seconds it took


class Event:
    """`with Event("a pass", counts, rows):` notes what was counted within."""

    def __init__(self, name: str, counts: Counts, rows: Row) -> None:
        self._name, self._counts, self._rows = name, counts, rows

    def __enter__(self) -> None:
        self._before, self._begun = self._counts.total(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begun
        time.sleep(0.05)  # for what nobody waits for
        counted = [after - before for before, after in zip(self._before, self._counts.total(), strict=True)]
        self._rows[self._name] = [*counted, seconds]


@contextmanager
def joining_together(workers: int) -> Iterator[None]:
    """All say that they are here before any looks for the others. How often one looks that has to wait depends on
    how fast the machine starts the rest, and on nothing that could be counted."""
    all_counted = threading.Barrier(workers)
    arrive = Attendance.arrive

    def arrive_and_meet(attendance: Attendance, has_own_name: bool) -> None:
        arrive(attendance, has_own_name)
        all_counted.wait(600)

    Attendance.arrive = arrive_and_meet  # type: ignore[method-assign]
    try:
        yield
    finally:
        Attendance.arrive = arrive  # type: ignore[method-assign]


def run(workers: int, counts: Counts) -> Row:
    """Counts for each event in a job of so many agents in this process."""
    rows: Row = {}
    store = HashStore()
    options = rpc.RpcBackendOptions(
        transports=("memory",), secret="one for all", heartbeat=_HEARTBEAT, rendezvous_timeout=600
    )
    pool = ThreadPoolExecutor(workers)

    def join(rank: int) -> Agent:
        return start(f"worker{rank}", rank, workers, options, store)

    with Event("all join", counts, rows), joining_together(workers):
        agents = list(pool.map(join, range(workers)))
    root = agents[0]
    set_current_agent(root)
    others = [agent.info.name for agent in agents[1:]]
    x = torch.ones(2, 2, requires_grad=True)

    def step() -> None:
        with autograd.context() as context_id:
            futures = [rpc.rpc_async(name, torch.mul, args=(x, 2.0)) for name in others]
            autograd.backward(context_id, [torch.stack([future.wait() for future in futures]).sum()])

    with Event("first call from one to all", counts, rows):
        for name in others:
            rpc.rpc_sync(name, torch.add, args=(1, 1))
    step()
    with Event("a pass over all: forward, backward, end", counts, rows):
        step()
    far = time.monotonic() + 600
    with Event("a barrier of all", counts, rows):
        list(pool.map(lambda agent: barrier(agent, "scale/0", 0, far), agents))
    with Event(f"{IDLE_SECONDS:.0f} s of idling", counts, rows):
        time.sleep(IDLE_SECONDS)
    with Event("a death, noticed by all who were linked", counts, rows):
        agents[-1].close(farewell=False)
        time.sleep(0.5)
    with Event("all leave", counts, rows):
        list(pool.map(lambda agent: wait_for_all(agent, 600), agents[:-1]))
    set_current_agent(None)
    for agent in agents:
        agent.close(farewell=False)
    pool.shutdown()
    return rows


def report(found: dict[int, Row], timed: bool) -> None:
    """Tables, as they stand in docs/scale.md."""
    sizes = list(found)
    for position, what in enumerate([*KINDS, *(["ms"] if timed else [])]):
        print(f"\n| {what}, all workers together | " + " | ".join(f"{size:,}" for size in sizes) + " |")
        print("| --- |" + " ---: |" * len(sizes))
        for event in found[sizes[0]]:
            numbers = [found[size].get(event, [float("nan")] * 5)[position] for size in sizes]
            cells = " | ".join(f"{number:,.0f}" if what != "ms" else f"{number * 1e3:,.1f}" for number in numbers)
            print(f"| {event} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[8, 64, 256])
    parser.add_argument("--processes", action="store_true", help="real worker processes")
    parser.add_argument("--save", type=Path, help="a folder for the counts")
    options = parser.parse_args()
    found: dict[int, Row] = {}
    if options.processes:
        for size in options.sizes:
            found[size] = scale_processes.run(size)
            print(f"{size} processes done", flush=True)
    else:
        logging.disable(logging.WARNING)  # that the last one is gone
        counts = Counts(1)
        count_here(counts, 0)
        for size in options.sizes:
            found[size] = run(size, counts)
    report(found, options.processes)
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        name = "processes" if options.processes else "agents"
        (options.save / f"scale-{name}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
