"""Rounds, interleaved: for each case, one round of every implementation after the other, several times over.

A case that cannot run on an implementation is reported with its error, and the rest goes on. Workers are kept from
case to case as long as the shape of the cluster stays the same, and stopped between their rounds if they do not idle
quietly.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

from benchmarks.cases import Case
from benchmarks.cluster import Cluster, ClusterError, burn, free_port


@dataclass(frozen=True)
class Plan:
    """How long to measure: rounds per case, seconds per round, fewest steps of one, seconds until it is given up."""

    rounds: int
    seconds: float
    least_steps: int
    deadline: float


FULL = Plan(rounds=7, seconds=0.4, least_steps=3, deadline=90.0)
QUICK = Plan(rounds=3, seconds=0.12, least_steps=1, deadline=12.0)


@dataclass
class Measured:
    """What one implementation did in one case. Either `rounds` or `error` says something."""

    rounds: list[list[float]] = field(default_factory=list)  # seconds per step
    cpu_caller: list[float] = field(default_factory=list)  # CPU seconds per operation, by round
    cpu_others: list[float] = field(default_factory=list)
    idle: float | None = None  # cores that all its workers together keep busy while nothing is asked of them
    error: str = ""


@dataclass
class Line:
    """One case, measured."""

    case: Case
    by_implementation: dict[str, Measured]


Shape = tuple[str, int, str, bool]


class Harness:
    """Owns the worker processes; leaving it ends them all."""

    def __init__(self, implementations: Sequence[str], plan: Plan) -> None:
        self._implementations = implementations
        self._plan = plan
        self._clusters: dict[Shape, Cluster] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keep_only(set())

    def run(self, case: Case) -> Line:
        shapes = {name: (name, case.workers, case.transport, not case.lifecycle) for name in self._implementations}
        self._keep_only(set(shapes.values()))
        line = Line(case, {name: Measured() for name in self._implementations})
        with _busy(case.busy_cores):
            for _ in range(self._plan.rounds):
                for name in self._implementations:
                    measured = line.by_implementation[name]
                    if measured.error:
                        continue
                    try:
                        with self._cluster(shapes[name]).awake() as cluster:
                            self._round(case, cluster, measured)
                    except ClusterError as error:
                        measured.error = str(error)
        return line

    def _round(self, case: Case, cluster: Cluster, measured: Measured) -> None:
        measured.idle = cluster.idle
        if case.lifecycle:
            port = free_port()
            start = time.perf_counter()
            cluster.order_all("join_and_leave", port, deadline=self._plan.deadline)
            measured.rounds.append([time.perf_counter() - start])
            return
        before = cluster.order_all("cpu", deadline=self._plan.deadline)
        sampled = cluster.order(
            "sample", case.key, self._plan.seconds, self._plan.least_steps, deadline=self._plan.deadline
        )
        after = cluster.order_all("cpu", deadline=self._plan.deadline)
        caller, *others = (end - begin for begin, end in zip(before, after, strict=True))
        operations = sampled.steps * case.operations
        measured.rounds.append(sampled.seconds)
        measured.cpu_caller.append(caller / operations)
        measured.cpu_others.append(sum(others) / operations)

    def _cluster(self, shape: Shape) -> Cluster:
        cluster = self._clusters.get(shape)
        if cluster is None or cluster.broken:
            if cluster is not None:
                cluster.end()
            implementation, workers, transport, joined = shape
            cluster = self._clusters[shape] = Cluster(implementation, workers, transport, joined)
        return cluster

    def _keep_only(self, shapes: set[Shape]) -> None:
        for shape in [shape for shape in self._clusters if shape not in shapes]:
            self._clusters.pop(shape).end()


@contextmanager
def _busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy with processes of their own."""
    context = multiprocessing.get_context("forkserver")
    burners: list[BaseProcess] = [context.Process(target=burn, daemon=True) for _ in range(cores)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()
