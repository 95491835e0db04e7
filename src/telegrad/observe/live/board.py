"""What all workers do, asked for once a second, as one state that a page, a terminal or Prometheus can show.

Counters only grow; rates and percentiles are those of the time between two looks. A worker that is gone stays in the
list, as dead, for as long as the board lives.
"""

import base64
import contextlib
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from telegrad.errors import TelegradError
from telegrad.observe.asking import ask_all
from telegrad.observe.explanation import look
from telegrad.observe.metrics import LinkCount, percentile
from telegrad.observe.service import LIVE, Observation
from telegrad.observe.snapshot import Snapshot, decode
from telegrad.rpc.agent import Agent
from telegrad.rpc.workers import Member

log = logging.getLogger("telegrad.observe")

SECONDS = 1.0
_HISTORY = 300
_MOST_LINKS = 40
_MOST_ROWS = 30
_MOST_TEXT = 40


class Board:
    """The state of a job, kept up to date by a thread."""

    def __init__(self, agent: Agent, seconds: float = SECONDS) -> None:
        self._agent = agent
        self._own = agent.find_layer(Observation)  # None for an observer, which is no worker
        self._watcher = f"{LIVE} {uuid.uuid4().hex}"
        self._seconds = seconds
        self._state: dict[str, Any] = {}
        self._members: dict[int, Member] = {}  # by incarnation, all that were ever seen
        self._latest: dict[int, Snapshot] = {}
        self._previous: dict[int, Snapshot] = {}
        self._history: deque[list[float]] = deque(maxlen=_HISTORY)
        self._asked_to_count: set[int] = set()
        self._changed = threading.Condition()
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telegrad-board", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._look()
        self._thread.start()

    def close(self) -> None:
        """Look no more; workers stop counting."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(5.0)
        with contextlib.suppress(TelegradError, OSError):
            if not self._agent.closing:
                if self._own is not None:
                    self._own.unwatch(self._watcher)
                ask_all(self._agent, self._alive(), "stop", self._watcher.encode(), 1.0)

    @property
    def closed(self) -> bool:
        """Whether it looks no more."""
        return self._ended.is_set()

    @property
    def state(self) -> dict[str, Any]:
        """The latest state; only values that JSON knows."""
        return self._state

    @property
    def snapshots(self) -> list[Snapshot]:
        """The latest counters of each worker."""
        return list(self._latest.values())

    def wait_for_news(self, after: int, seconds: float) -> dict[str, Any] | None:
        """The next state after that number; None if there is none in time, or the board has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > after or self._ended.is_set(), seconds)
            return self._state if self._number > after else None

    # --- looking ---

    def _run(self) -> None:
        while not self._ended.wait(self._seconds) and not self._agent.closing:
            try:
                self._look()
            except Exception as error:
                log.warning("the state of the job could not be read: %s", error)

    def _alive(self) -> list[Member]:
        agent = self._agent
        return [m for m in agent.directory.members() if not agent.is_dead(m)]

    def _look(self) -> None:
        agent = self._agent
        agent.peers.look_for_news()
        for member in agent.directory.members():
            self._members[member.incarnation] = member
        alive = self._alive()
        new = [m for m in alive if m.incarnation not in self._asked_to_count]
        if new:
            answers = ask_all(agent, new, "record", self._watcher.encode())
            self._asked_to_count |= {incarnation for incarnation, answer in answers.items() if answer is not None}
            if self._own is not None:
                self._own.watch(self._watcher)
                self._asked_to_count.add(agent.member.incarnation)
        before = self._latest
        found = {i: decode(data) for i, data in ask_all(agent, alive, "snapshot").items() if data is not None}
        if self._own is not None:  # through its encoded form: the counters themselves go on
            found[agent.member.incarnation] = decode(self._own.answer("snapshot", b""))
        self._previous, self._latest = before, {**before, **found}
        state = self._describe(set(found))
        with self._changed:
            self._number += 1
            state["number"] = self._number
            self._state = state
            self._changed.notify_all()

    # --- describing ---

    def _describe(self, answered: set[int]) -> dict[str, Any]:
        agent = self._agent
        members = sorted(self._members.values(), key=lambda m: (m.worker_id, m.incarnation))
        newest = {int(m.worker_id): m.incarnation for m in members}
        names = {int(m.worker_id): m.name for m in members}
        links = self._links(names)
        rates = _Sum(links)
        self._history.append([time.time(), rates.calls, rates.bytes, rates.at(0.5) * 1e3, rates.at(0.99) * 1e3])
        explanation = look(agent)
        living = [self._latest[i] for i in answered]
        return {
            "time": time.time(),
            "workers": [self._worker(m, answered, links, m.incarnation == newest[int(m.worker_id)]) for m in members],
            "totals": {
                "workers": len(members),
                "up": len(answered),
                "calls": round(rates.calls, 1),
                "bytes": round(rates.bytes),
                "p50": rates.at(0.5),
                "p90": rates.at(0.9),
                "p99": rates.at(0.99),
            },
            "history": [list(column) for column in zip(*self._history, strict=True)],
            "links": [
                {"from": names[a], "to": names.get(b, str(b)), **link.row()}
                for (a, b), link in sorted(links.items(), key=lambda kv: -kv[1].calls - kv[1].in_flight)[:_MOST_LINKS]
            ],
            "matrix": _matrix(sorted(names), links),
            "references": _references(living, names),
            "contexts": [
                {"context": str(c.context), "worker": s.name, "opened_by": names.get(c.opened_by, str(c.opened_by))}
                | {"sends": c.sends, "receives": c.receives, "participants": c.participants, "failed": c.failed}
                for s in living
                for c in s.contexts
            ][:_MOST_ROWS],
            "context_count": len({c.context for s in living for c in s.contexts}),
            "passes": _passes(living, names),
            "waits": [edge._asdict() for edge in explanation.edges[: 4 * _MOST_ROWS]],
            # Workers that only serve wait at the barrier of their shutdown: no news on a page.
            "explanation": [text for text in explanation.paragraphs if not text.startswith("At a barrier")][
                :_MOST_TEXT
            ],
            "deadlocks": explanation.deadlocks,
            "recent": self._recent(),
        }

    def _links(self, names: dict[int, str]) -> dict[tuple[int, int], "_Rate"]:
        links: dict[tuple[int, int], _Rate] = {}
        for incarnation, now in self._latest.items():
            before = self._previous.get(incarnation)
            seconds = now.clock - before.clock if before is not None else 0.0
            for to, count in now.links.items():
                old = before.links.get(to, LinkCount()) if before is not None else count
                if to in names and now.worker_id in names:
                    links[now.worker_id, to] = _Rate(count, old, seconds, now.in_flight.get(to, 0))
        return links

    def _worker(
        self, member: Member, answered: set[int], links: dict[tuple[int, int], "_Rate"], newest: bool
    ) -> dict[str, Any]:
        agent = self._agent
        dead = agent.is_dead(member) or not newest
        state = "dead" if dead else "up" if member.incarnation in answered else "silent"
        row: dict[str, Any] = {"id": int(member.worker_id), "name": member.name, "state": state, "pid": member.pid}
        known = self._latest.get(member.incarnation)
        if known is None or dead:
            return row
        out = [rate for (a, _), rate in links.items() if a == member.worker_id]
        into = [rate for (_, b), rate in links.items() if b == member.worker_id]
        return row | {
            "host": known.host,
            "calls": round(sum(rate.calls for rate in out), 1),
            "served": round(sum(rate.calls for rate in into), 1),
            "bytes": round(sum(rate.bytes for rate in out)),
            "in_flight": sum(known.in_flight.values()),
            "serving": known.serving,
            "threads": known.threads,
            "memory": known.memory,
            "owned": known.owned,
            "owned_bytes": known.owned_bytes,
            "contexts": len(known.contexts),
        }

    def _recent(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, str], tuple[float, list[str]]] = {}
        for snap in self._latest.values():
            for when, kind, text in snap.recent:
                first, tellers = found.setdefault((kind, text), (when, []))
                found[kind, text] = (min(first, when), [*tellers, snap.name])
        ordered = sorted(found.items(), key=lambda item: -item[1][0])[:_MOST_ROWS]
        return [{"time": w, "kind": kind, "text": text, "by": sorted(by)} for (kind, text), (w, by) in ordered]


class _Rate:
    """What went over a link between two looks."""

    def __init__(self, now: LinkCount, before: LinkCount, seconds: float, in_flight: int) -> None:
        per = 1.0 / seconds if seconds > 0 else 0.0
        self.calls = (now.calls - before.calls) * per
        self.failed = (now.failed - before.failed) * per
        self.bytes = (now.bytes_out - before.bytes_out) * per
        self.in_flight = in_flight
        self.total = now.calls
        self.latency = {
            bucket: count - before.latency.get(bucket, 0)
            for bucket, count in now.latency.items()
            if count > before.latency.get(bucket, 0)
        }

    def row(self) -> dict[str, Any]:
        """For a table. Percentiles are None if there were no calls."""
        busy = bool(self.latency)
        return {
            "calls": round(self.calls, 1),
            "failed": round(self.failed, 1),
            "bytes": round(self.bytes),
            "in_flight": self.in_flight,
            "total": self.total,
            "p50": percentile(self.latency, 0.5) if busy else None,
            "p90": percentile(self.latency, 0.9) if busy else None,
            "p99": percentile(self.latency, 0.99) if busy else None,
        }


class _Sum:
    """All links together."""

    def __init__(self, links: dict[tuple[int, int], _Rate]) -> None:
        self.calls = sum(link.calls for link in links.values())
        self.bytes = sum(link.bytes for link in links.values())
        self._latency: dict[int, int] = {}
        for link in links.values():
            for bucket, count in link.latency.items():
                self._latency[bucket] = self._latency.get(bucket, 0) + count

    def at(self, share: float) -> float:
        """A percentile of all latencies, in seconds."""
        return percentile(self._latency, share)


def _matrix(ids: list[int], links: dict[tuple[int, int], _Rate]) -> dict[str, Any]:
    """Calls a second from each worker to each, on a logarithmic scale of 0 to 255: small enough for 128 workers."""
    place = {worker: position for position, worker in enumerate(ids)}
    cells = bytearray(len(ids) * len(ids))
    most = max((link.calls for link in links.values()), default=0.0)
    scale = 255.0 / math.log1p(most) if most > 0 else 0.0
    for (a, b), link in links.items():
        if link.calls > 0:
            cells[place[a] * len(ids) + place[b]] = max(1, round(math.log1p(link.calls) * scale))
    return {"size": len(ids), "cells": base64.b64encode(cells).decode(), "most": round(most, 1)}


def _references(living: list[Snapshot], names: dict[int, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"owner": snap.name, "holder": names.get(holder, str(holder)), "bytes": size}
        for snap in living
        for holder, size in snap.held_by.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])[:_MOST_ROWS]


def _passes(living: list[Snapshot], names: dict[int, str]) -> list[dict[str, Any]]:
    passes: dict[int, dict[str, Any]] = {}
    name: Callable[[int], str] = lambda worker: names.get(worker, str(worker))  # noqa: E731 - used twice, here
    for snap in living:
        for part in snap.passes:
            row = passes.setdefault(part.context, {"context": str(part.context), "root": name(part.root), "parts": []})
            waited = sorted({name(worker) for worker in part.waits_for})
            row["parts"].append({"worker": snap.name, "heard": part.heard, "waits_for": waited})
    return list(passes.values())[:_MOST_ROWS]
