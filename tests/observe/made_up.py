"""A job of many workers that is made up: what they would answer a board, without their processes."""

import random
from types import SimpleNamespace
from typing import Any

from telegrad.ids import Incarnation, WorkerId
from telegrad.observe.events.records import encode
from telegrad.observe.metrics import FunctionCount, LinkCount
from telegrad.observe.snapshot import ContextState, PassView, Snapshot
from telegrad.observe.threads import Activity, Asked, InService, PassState, Report
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import Address

CONTEXT = 7
ROOT = 5


class MadeUpJob:
    """`size` workers that all call each other; two are dead, one is silent, and a pass waits for worker 11."""

    def __init__(self, size: int) -> None:
        self._random = random.Random(0)
        self.looks = 0
        where = (Address("tcp", "10.0.0.1", "1"),)
        self.members = [
            Member(f"worker{i}", WorkerId(i), Incarnation(i + 1 << 10), where, 1000 + i) for i in range(size)
        ]
        self.dead = {member.incarnation for member in self.members[40:42]}
        self.silent = self.members[50].incarnation
        self._calls = {
            (a, b): self._random.choice((0, 0, 1, 2, 4)) * 37 for a in range(size) for b in range(size) if a != b
        }
        self.agent: Any = SimpleNamespace(
            member=SimpleNamespace(incarnation=-1),
            directory=SimpleNamespace(members=lambda: self.members),
            peers=SimpleNamespace(look_for_news=lambda: None, everyone=lambda: self.members),
            is_dead=lambda member: member.incarnation in self.dead,
            find_layer=lambda kind: None,
            closing=False,
        )

    def ask_all(self, agent: Any, members: Any, what: str, data: bytes = b"", seconds: float = 0.0) -> dict[int, Any]:
        """In place of `asking.ask_all`."""
        if what == "snapshot":
            self.looks += 1
        answer = {"snapshot": self._snapshot, "threads": self._report}.get(what, lambda member: None)
        return {m.incarnation: None if m.incarnation == self.silent else encode(answer(m)) for m in members}

    def _snapshot(self, member: Member) -> Snapshot:
        me, looks = int(member.worker_id), self.looks
        links = {}
        for other in self.members:
            calls = self._calls.get((me, int(other.worker_id)), 0) * looks
            if calls:
                latency = {40: calls * 9 // 10, 52: calls // 10}
                links[int(other.worker_id)] = LinkCount(calls, 0, calls * 4096, calls * 1e-3, latency)
        waits = (
            [PassView(CONTEXT, ROOT, 1, [11])]
            if me in (5, 8, 9)
            else [PassView(CONTEXT, ROOT, 0, [])]
            if me == 11
            else []
        )
        contexts = [ContextState(CONTEXT, ROOT, 2, 2, 4, False)] if me in (5, 8, 9, 11) else []
        dead = [(1.0e9 + looks, "death", f"{m.name} is gone") for m in self.members if m.incarnation in self.dead]
        return Snapshot(
            member.name, me, int(member.incarnation), member.pid, f"node{me // 8}", float(looks), links,
            {"forward()": FunctionCount(looks, 0, 0.1, {40: looks})}, {11: 1} if me in (5, 8) else {}, me % 3, 20,
            300_000_000 + me * 1_000_000, 3, 12_000_000, {(me + 1) % len(self.members): 12_000_000}, 2, contexts, waits,
            dead, 0,
        )  # fmt: skip

    def _report(self, member: Member) -> Report:
        me = int(member.worker_id)
        key = (int(self.members[5].incarnation), 1, 9)
        threads, asked, served, passes = [], [], [], []
        if me == 5:
            threads, asked = (
                [Activity("MainThread", None, key, where="train.py:31, in step")],
                [Asked(key, 8, "f() on worker 'worker8'", 4.0)],
            )
        elif me == 8:
            threads, served = (
                [Activity("io", key, where="model.py:12, in f")],
                [InService(key, "worker5", "PythonCall", 4.0)],
            )
        if me == 11:
            threads, passes = (
                [Activity("io", runs_pass=CONTEXT, where="hook.py:3, in hook")],
                [PassState(CONTEXT, ROOT, [])],
            )
        if me in (5, 8, 9):
            passes = [PassState(CONTEXT, ROOT, [11])]
        return Report(member.name, me, int(member.incarnation), False, threads, asked, served, passes, [])
