"""Who waits for whom over all workers, which of it can still end, and which never will. Pure.

What waits is a thread, a request or a worker's part in a pass; each can go on if something it depends on can:

    a thread      that runs, always; one that waits for a request, with that request; one that began a pass, with
                  any part of it
    a request     with the thread that serves it; one that no thread serves yet, if its worker has a thread left, or
                  with any of its threads
    a part of     that is being run; else with the part of any worker whose gradients it waits for; one whose peer has
    a pass        not begun can, since it will be told

What cannot go on by any of these is a deadlock, and following its dependencies leads round in a circle.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from telegrad.observe.threads import Activity, Key, Report

Node = tuple[str, Any, Any]  # what it is, its worker or key, its number or context

_LONG = 1.0  # seconds after which a thread that sleeps is taken for one that waits for a lock


class Edge(NamedTuple):
    """One thing that waits: in whose worker, for which worker, and in words."""

    worker: str
    waits_for: str
    text: str
    stuck: bool


class Explanation(NamedTuple):
    """What is waited for, a paragraph each; and the circles that nothing will end."""

    paragraphs: list[str]
    edges: list[Edge]
    deadlocks: list[str]


def explain_reports(reports: Sequence[Report], silent: Sequence[str] = ()) -> Explanation:
    """Tie the reports of all workers together; `silent` are workers that did not answer."""
    graph = _Graph(reports)
    going = graph.what_goes_on()
    paragraphs: list[str] = []
    edges: list[Edge] = []
    deadlocks: dict[frozenset[Node], str] = {}
    for report in reports:
        for node, text, target in graph.waits_of(report):
            stuck = node not in going
            end = graph.who_can_end(node, target, going)
            paragraphs.append(f"{text} {end}")
            if not stuck and (likely := graph.likely_circle(node)):
                stuck = True
                deadlocks.setdefault(frozenset(likely), graph.say_likely(likely))
            elif stuck:
                circle = graph.circle(node)
                deadlocks.setdefault(frozenset(circle), graph.say_circle(circle))
            edges.append(Edge(report.name, target, text, stuck))
        for other, worker in report.others:
            if other.startswith("barrier "):
                continue  # said once below, by those who wait there
            paragraphs.append(f"{report.name}: {other}. {graph.name_of(worker)} could end it.")
            edges.append(Edge(report.name, graph.name_of(worker), other, False))
    waiting = {report.name: asked.to for report in reports for asked in report.asked if _at_barrier(asked.what)}
    if waiting:
        host = graph.name_of(next(iter(waiting.values())))
        paragraphs.append(f"At a barrier, such as that of their shutdown, wait {', '.join(waiting)}; {host} counts.")
    paragraphs += [f"{name} did not answer: it is stopped, or too busy to say what it does." for name in silent]
    return Explanation(paragraphs, edges, list(deadlocks.values()))


class _Graph:
    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = {report.worker_id: report for report in reports}
        self._served_by: dict[Key, tuple[Report, int | None]] = {}
        self._asked: Mapping[Key, tuple[Report, int, str, float]] = {
            asked.key: (report, asked.to, asked.what, asked.seconds) for report in reports for asked in report.asked
        }
        self._passes: dict[int, list[Node]] = {}
        self.depends: dict[Node, list[Node]] = {}
        self._free: set[Node] = set()
        for report in reports:
            for request in report.served:
                self._served_by[request.key] = (report, None)
            for number, thread in enumerate(report.threads):
                if thread.serves is not None and thread.serves in self._served_by:
                    self._served_by[thread.serves] = (report, number)
            for state in report.passes:
                self._passes.setdefault(state.context, []).append(("pass", report.worker_id, state.context))
        for report in reports:
            self._add(report)
        for key in self._asked:
            self._request(key)

    def _add(self, report: Report) -> None:
        running = {thread.runs_pass for thread in report.threads if thread.waits_for is None}
        for number, thread in enumerate(report.threads):
            node: Node = ("thread", report.worker_id, number)
            if thread.waits_for is not None:
                self.depends[node] = [self._request(thread.waits_for)]
            elif thread.awaits_pass >= 0:
                self.depends[node] = self._passes.get(thread.awaits_pass, [])
            if not self.depends.get(node):
                self._free.add(node)
        for state in report.passes:
            node = ("pass", report.worker_id, state.context)
            if state.context in running or not state.waits_for:
                self._free.add(node)
                continue
            self.depends[node] = []
            for peer in state.waits_for:
                other: Node = ("pass", peer, state.context)
                if other in self._passes.get(state.context, []):
                    self.depends[node].append(other)
                elif peer in self._reports:
                    self._free.add(node)

    def _request(self, key: Key) -> Node:
        node: Node = ("request", key, None)
        if node in self.depends or node in self._free:
            return node
        found = self._served_by.get(key)
        if found is not None:
            report, number = found
            if number is None:
                self._free.add(node)  # a coroutine, or a future: no thread of its own
            else:
                self.depends[node] = [("thread", report.worker_id, number)]
            return node
        asked = self._asked.get(key)
        callee = None if asked is None else self._reports.get(asked[1])
        if callee is not None and callee.exhausted:
            self.depends[node] = [("thread", callee.worker_id, number) for number in range(len(callee.threads))]
        else:
            self._free.add(node)  # on its way, or its worker says nothing
        return node

    def what_goes_on(self) -> set[Node]:
        """All that can still come to an end."""
        going = set(self._free)
        changed = True
        while changed:
            changed = False
            for node, needed in self.depends.items():
                if node not in going and any(other in going for other in needed):
                    going.add(node)
                    changed = True
        return going

    def circle(self, start: Node) -> list[Node]:
        """Follow the dependencies of something stuck until they come round."""
        path: list[Node] = []
        node = start
        while node not in path:
            path.append(node)
            following = self.depends.get(node)
            if not following:
                return path
            node = following[0]
        return path[path.index(node) :]

    def likely_circle(self, start: Node) -> list[Node]:
        """What leads back to a worker that waits itself, to a thread that sleeps there: for a lock, most likely."""
        path: list[Node] = []
        node = start
        while node not in path:
            path.append(node)
            following = self.depends.get(node)
            if not following or len(following) > 1:
                break
            node = following[0]
        threads = [n for n in path if n[0] == "thread"]
        last = path[-1]
        if last[0] != "thread" or last in self.depends or len(threads) < 3:
            return []
        report, number = self._reports[last[1]], last[2]
        begin = next((i for i, n in enumerate(threads[:-1]) if n[1] == last[1]), None)
        if begin is None or not report.threads[number].sleeps or self._seconds(threads[begin]) < _LONG:
            return []
        return threads[begin:]

    def _seconds(self, node: Node) -> float:
        thread = self._reports[node[1]].threads[node[2]]
        return self._asked[thread.waits_for][3] if thread.waits_for and thread.waits_for in self._asked else 0.0

    def say_likely(self, threads: Sequence[Node]) -> str:
        """Such a circle, in words."""
        last = self._reports[threads[-1][1]].threads[threads[-1][2]]
        first = self.say_circle(threads[:-1]).removesuffix("; and so on, round in a circle")
        return f"{first}; and there {last.name} sleeps{_where(last)}, most likely for a lock that is held meanwhile"

    # --- in words ---

    def name_of(self, worker: Any) -> str:
        """A worker's name."""
        report = self._reports.get(worker)
        return f"worker {worker}" if report is None else report.name

    def waits_of(self, report: Report) -> list[tuple[Node, str, str]]:
        """What waits on a worker: the node, in words, and the worker it waits for."""
        found: list[tuple[Node, str, str]] = []
        in_person = set()
        for number, thread in enumerate(report.threads):
            node: Node = ("thread", report.worker_id, number)
            if thread.waits_for is not None and thread.waits_for in self._asked:
                in_person.add(thread.waits_for)
                _, to, what, seconds = self._asked[thread.waits_for]
                text = f"{report.name} ({_who(thread)}) has waited {seconds:.1f} s for {what}{_where(thread)}."
                found.append((node, text, self.name_of(to)))
            elif thread.awaits_pass >= 0:
                late = sorted(
                    {self.name_of(w) for _, w, _ in self._passes.get(thread.awaits_pass, []) if w is not None}
                )
                others = [name for name in late if name != report.name]
                if not others:
                    continue  # it runs its own part
                text = (
                    f"{report.name} ({_who(thread)}) waits for the end of the backward pass of context "
                    f"{thread.awaits_pass}{_where(thread)}; not done: {', '.join(others)}."
                )
                found.append((node, text, others[0]))
        for asked in report.asked:
            if asked.key not in in_person and "backward pass" not in asked.what and not _at_barrier(asked.what):
                text = (
                    f"{report.name} asked {asked.seconds:.1f} s ago, and no thread waits for the reply: {asked.what}."
                )
                found.append((self._request(asked.key), text, self.name_of(asked.to)))
        for state in report.passes:
            if state.waits_for:
                peers = [self.name_of(peer) for peer in dict.fromkeys(state.waits_for)]
                text = (
                    f"{report.name}, in the backward pass of context {state.context} that {self.name_of(state.root)} "
                    f"began, waits for gradients of {', '.join(peers)}."
                )
                found.append((("pass", report.worker_id, state.context), text, peers[0]))
        return found

    def who_can_end(self, node: Node, target: str, going: set[Node]) -> str:
        """Which worker could end a wait, and what it does."""
        if node not in going:
            return "Nothing can end it: a deadlock."
        seen = set()
        while node in self.depends and node not in seen:
            seen.add(node)
            following = [other for other in self.depends[node] if other in going]
            if not following:
                break
            node = following[0]
        kind, worker, number = node
        report = self._reports.get(worker) if kind != "request" else None
        if kind == "thread" and report is not None:
            thread = report.threads[number]
            return f"{report.name} could end it: {_who(thread)} runs{_where(thread) or ' there'}."
        if kind == "pass" and report is not None:
            return f"{report.name} could end it: it runs its part of the pass."
        return f"{target} could end it."

    def say_circle(self, circle: Sequence[Node]) -> str:
        """A deadlock, in words."""
        parts = []
        for kind, worker, number in circle:
            report = self._reports.get(worker) if kind != "request" else None
            if kind == "thread" and report is not None:
                thread: Activity = report.threads[number]
                asked = self._asked.get(thread.waits_for) if thread.waits_for else None
                what = "a backward pass" if asked is None else asked[2]
                parts.append(f"{report.name} waits for {what}{_where(thread)}")
            elif kind == "pass" and report is not None:
                state = next(s for s in report.passes if s.context == number)
                peers = ", ".join(self.name_of(peer) for peer in dict.fromkeys(state.waits_for))
                parts.append(f"{report.name} waits for gradients of {peers}")
        return "; ".join(parts) + "; and so on, round in a circle"


def _at_barrier(what: str) -> bool:
    return what.startswith("reaching the barrier")


def _who(thread: Activity) -> str:
    return thread.name


def _where(thread: Activity) -> str:
    return f" at {thread.where}" if thread.where else ""
