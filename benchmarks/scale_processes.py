"""The counts of `benchmarks.scale` from real worker processes, forked from one that has torch loaded."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.cluster import free_port
from benchmarks.counting import Counts, count_here
from benchmarks.parent_death import tie_to_harness

_SHARED = (
    "torch",
    "telegrad.autograd",
    "telegrad.engine",
    "telegrad.rref",
    "telegrad.observe",
)  # loaded before forking
_DEADLINE = 120.0
_WAITS = 2.2  # seconds that each worker takes for an answer, while the root asks every second whether it lives


def run(workers: int) -> dict[str, list[float]]:
    """Counts and seconds for each event in a job of so many processes."""
    for module in _SHARED:
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    counts = Counts(workers)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    pipes: list[Any] = []
    processes = []
    for rank in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(rank, workers, addresses, counts, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    rows: dict[str, list[float]] = {}

    def event(name: str, order: str, ranks: range, times: int = 1) -> None:
        before, begun = counts.total(), time.perf_counter()
        for rank in ranks:
            pipes[rank].send((order, times))
        seconds = max(_gather([pipes[rank] for rank in ranks]).values())
        if order == "join":
            seconds = time.perf_counter() - begun
        time.sleep(0.1)
        if name:
            rows[name] = [(after - b) // times for b, after in zip(before, counts.total(), strict=True)] + [seconds]

    everyone, root = range(workers), range(1)
    try:
        event("", "load", everyone)
        event("all join", "join", everyone)
        event("first call from one to all", "call", root)
        event("", "step", root)
        event("a pass over all: forward, backward, end", "step", root)
        event("the same, the median of twenty that follow", "step", root, times=20)
        event("a barrier of all", "barrier", everyone)
        event(f"calls of {_WAITS} s to all, with heartbeats each second", "long", root)
        event("2 s of idling", "idle", root)
        event("all leave", "leave", everyone)
        # Forked processes copy a page of memory when they first write to it, 300 of them in a first call: a second job
        # in the same processes shows what a call costs without that.
        event("", "join", everyone)
        event("first call from one to all, in a second job of these processes", "call", root)
        before = counts.total()
        os.kill(processes[-1].pid or 0, signal.SIGKILL)
        time.sleep(1.5)
        died = [after - b for b, after in zip(before, counts.total(), strict=True)]
        rows["a death, noticed by all who were linked"] = [*died, 0.0]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return rows


def _gather(pipes: list[Any]) -> dict[Any, float]:
    waiting, answers, ends_at = set(pipes), {}, time.monotonic() + _DEADLINE
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, ends_at - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(waiting)} workers did not answer")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            waiting.discard(pipe)
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(answer)
            answers[pipe] = answer
    return answers


def _worker(rank: int, workers: int, addresses: list[str], counts: Counts, orders: Any) -> None:
    tie_to_harness()
    import torch

    from telegrad import autograd, rpc
    from telegrad.rpc.current import require_agent
    from telegrad.rpc.job.barrier import barrier

    torch.set_num_threads(1)
    count_here(counts, rank)
    others = [f"worker{other}" for other in range(1, workers)]
    x = torch.ones(2, 2, requires_grad=True)

    def join() -> None:
        options = rpc.RpcBackendOptions(
            init_method=addresses.pop(0), rendezvous_timeout=_DEADLINE, rpc_timeout=_DEADLINE
        )
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)

    def call() -> None:
        for name in others:
            rpc.rpc_sync(name, torch.add, args=(1, 1))

    def step() -> None:
        with autograd.context() as context_id:
            futures = [rpc.rpc_async(name, torch.mul, args=(x, 2.0)) for name in others]
            autograd.backward(context_id, [torch.stack([future.wait() for future in futures]).sum()])

    def meet() -> None:
        barrier(require_agent(), "scale/0", 0, time.monotonic() + _DEADLINE)

    def long() -> None:
        for future in [rpc.rpc_async(name, time.sleep, args=(_WAITS,)) for name in others]:
            future.wait()

    known: dict[str, Callable[[], None]] = {
        "load": lambda: None,
        "join": join,
        "call": call,
        "step": step,
        "barrier": meet,
        "long": long,
        "idle": lambda: time.sleep(2.0),
        "leave": lambda: rpc.shutdown(timeout=_DEADLINE),
    }
    while True:
        name, times = orders.recv()
        try:
            orders.send(statistics.median([_seconds(known[name]) for _ in range(times)]))
        except Exception as error:
            orders.send(f"worker{rank}: {error!r}")


def _seconds(order: Callable[[], None]) -> float:
    begun = time.perf_counter()
    order()
    return time.perf_counter() - begun
