"""What grows with the number of workers: messages, bytes and store operations, counted over all workers together.

    python -m benchmarks.scale 8 16 32 64

All agents live in this process, over the memory transport, and do what they do anywhere: join through a store, call,
run a pass, meet at a barrier, idle, lose one. Counts have no noise, so a machine that could never run so many workers
at speed can still say how their number enters.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store

from telegrad import autograd, rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import set_current_agent
from telegrad.rpc.job.barrier import barrier
from telegrad.rpc.job.join import start
from telegrad.rpc.job.rendezvous.member_log import MemberLog
from telegrad.rpc.workers import Member
from telegrad.transport import connection

_lock = threading.Lock()
_counted: Counter[str] = Counter()
IDLE_SECONDS = 2.0


def _count(what: str, number: int = 1) -> None:
    with _lock:
        _counted[what] += number


class CountingStore(Store):
    """A store in this process that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self._store = HashStore()

    def __getattribute__(self, name: str) -> Any:
        if name in _COUNTED:
            _count("store operations")
            return getattr(object.__getattribute__(self, "_store"), name)
        if name == "has_extended_api":
            return object.__getattribute__(self, "_store").has_extended_api
        return object.__getattribute__(self, name)


_COUNTED = ("set", "get", "add", "compare_set", "delete_key", "num_keys", "check", "wait", "append", "multi_get")


def count_messages() -> None:
    """From now on count every frame that any connection writes, and its bytes."""
    for name in ("encode_whole", "encode_prefix"):
        encode = getattr(connection, name)

        def counting(*args: Any, _encode: Any = encode, **kwargs: Any) -> bytes:
            frame: bytes = _encode(*args, **kwargs)
            _count("messages")
            _count("bytes", len(frame))
            return frame

        setattr(connection, name, counting)


class Event:
    """`with Event("a pass") as event:` notes what was counted within."""

    def __init__(self, name: str, rows: dict[str, Counter[str]]) -> None:
        self._name, self._rows = name, rows

    def __enter__(self) -> None:
        _counted.clear()

    def __exit__(self, *_: object) -> None:
        time.sleep(0.05)  # for what nobody waits for
        self._rows[self._name] = Counter(_counted)


@contextmanager
def joining_together(workers: int) -> Iterator[None]:
    """All write their records before any looks for those of the others. How often one looks that has to wait depends on
    how fast the machine starts the rest, and on nothing that could be counted."""
    all_written = threading.Barrier(workers)
    publish = MemberLog.publish

    def publish_and_meet(log: MemberLog, member: Member) -> None:
        publish(log, member)
        all_written.wait(600)

    MemberLog.publish = publish_and_meet  # type: ignore[method-assign]
    try:
        yield
    finally:
        MemberLog.publish = publish  # type: ignore[method-assign]


def run(workers: int) -> dict[str, Counter[str]]:
    """Counts for each event in a job of so many workers."""
    rows: dict[str, Counter[str]] = {}
    store = CountingStore()
    options = rpc.RpcBackendOptions(transports=("memory",), secret="one for all", heartbeat=0.5)
    pool = ThreadPoolExecutor(workers)

    def join(rank: int) -> Agent:
        return start(f"worker{rank}", rank, workers, options, store)

    with Event("all join", rows), joining_together(workers):
        agents = list(pool.map(join, range(workers)))
    root = agents[0]
    set_current_agent(root)
    others = [agent.info.name for agent in agents[1:]]
    x = torch.ones(2, 2, requires_grad=True)

    def step() -> None:
        with autograd.context() as context_id:
            futures = [rpc.rpc_async(name, torch.mul, args=(x, 2.0)) for name in others]
            autograd.backward(context_id, [torch.stack([future.wait() for future in futures]).sum()])

    with Event("first call from one to all", rows):
        for name in others:
            rpc.rpc_sync(name, torch.add, args=(1, 1))
    step()
    with Event("a pass over all (forward, backward, end)", rows):
        step()
    far = time.monotonic() + 60
    with Event("a barrier of all", rows):
        list(pool.map(lambda agent: barrier(agent, "scale/0", 0, far), agents))
    with Event(f"{IDLE_SECONDS:.0f} s of idling", rows):
        time.sleep(IDLE_SECONDS)
    with Event("a death, noticed by all who were linked", rows):
        agents[-1].close(farewell=False)
        time.sleep(0.5)
    set_current_agent(None)
    for agent in agents:
        agent.close(farewell=False)
    pool.shutdown()
    return rows


def main(sizes: list[int]) -> None:
    count_messages()
    found = {size: run(size) for size in sizes}
    for what in ("messages", "bytes", "store operations"):
        print(f"\n| {what}, all workers together | " + " | ".join(map(str, sizes)) + " |")
        print("| --- |" + " ---: |" * len(sizes))
        for event in found[sizes[0]]:
            cells = " | ".join(f"{found[size][event][what]:,}" for size in sizes)
            print(f"| {event} | {cells} |")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [8, 16, 32, 64])
