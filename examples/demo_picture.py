"""The picture of the demo: which worker did what and when, and the distributed autograd graph of one step.

Workers note what they do while a recording is on. All are on one machine, so their monotonic clocks are the same one.
"""

import contextlib
import html
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from telegrad import rpc
from telegrad.autograd.registry import registry

COLOURS = {
    "forward": "#4c8bf5",
    "forward and loss": "#a9c6fa",
    "backward": "#e4572e",
    "hand out weights": "#8e6cc9",
    "optimizer": "#3aa76d",
    "step on all owners": "#a8dcc0",
}


class Event(NamedTuple):
    """Something a worker did, with its beginning and end in seconds."""

    worker: str
    what: str
    begin: float
    end: float


class Node(NamedTuple):
    """A node of the autograd graph on one worker, and the names of those it leads to."""

    worker: str
    name: str
    label: str
    leads_to: list[str]


class Edge(NamedTuple):
    """A way that gradients take, within a worker or from one to another."""

    source: str
    target: str


_on = False
_events: list[Event] = []
_graph: list[Node] = []
_backward_began = 0.0


# --- what workers note ---


@contextlib.contextmanager
def span(what: str) -> Iterator[None]:
    """Note how long a block takes."""
    begin = time.monotonic()
    yield
    _note(what, begin)


def backward_begins(_: Tensor) -> None:
    """A hook for the output of a worker's layers."""
    global _backward_began  # noqa: PLW0603
    _backward_began = time.monotonic()


def backward_ends(_: Tensor) -> None:
    """A hook for a worker's parameters; the last one to be called counts."""
    if _events and _events[-1].what == "backward" and _events[-1].begin == _backward_began:
        _events.pop()
    _note("backward", _backward_began or time.monotonic())


def _note(what: str, begin: float) -> None:
    if _on:
        _events.append(Event(rpc.get_worker_info().name, what, begin, time.monotonic()))


def _switch_on() -> None:
    global _on  # noqa: PLW0603
    _on = True


def _noted() -> list[Event]:
    return _events


def start_recording(workers: Sequence[str]) -> None:
    """Have all workers note what they do from now on."""
    for worker in workers:
        rpc.rpc_sync(worker, _switch_on)


# --- the graph ---


def keep_graph(context_id: int, loss: Tensor) -> None:
    """Keep the graph of the first step of a recording: every worker's part, joined where a Recv answers a Send."""
    if not _on or _graph:
        return
    participants = registry().find(context_id).participants
    _graph.extend(local_graph(context_id, loss))
    for worker in sorted(participants - {rpc.get_worker_info().id}):
        _graph.extend(rpc.rpc_sync(int(worker), local_graph, args=(context_id, None)))


def local_graph(context_id: int, loss: Tensor | None) -> list[Node]:
    """This worker's nodes, from its Sends (and the loss) down."""
    here = rpc.get_worker_info().name
    context = registry().find(context_id)
    recvs = {id(recv.node): f"recv {message}" for message, recv in context.recvs.items()}
    found: dict[str, Node] = {}

    def name(node: Any) -> str:
        return recvs.get(id(node), f"{here} {id(node)}")

    def visit(node: Any) -> None:
        if name(node) in found:
            return
        is_recv = id(node) in recvs
        below = [] if is_recv else [after for after, _ in node.next_functions if after is not None]
        label = "Recv" if is_recv else node.name().replace("Backward0", "").replace("torch::autograd::", "")
        message = name(node).removeprefix("recv ")
        found[name(node)] = Node(here, name(node), label, [f"send {message}"] if is_recv else [name(n) for n in below])
        for after in below:
            visit(after)

    if loss is not None:
        visit(loss.grad_fn)
    for message, send in context.sends.items():
        for edge in send.edges:
            visit(edge.node)
        found[f"send {message}"] = Node(here, f"send {message}", "Send", [name(edge.node) for edge in send.edges])
    return list(found.values())


def _layers(nodes: Sequence[Node]) -> dict[str, int]:
    """How far each node is from the loss: the longest way."""
    depth = {node.name: 0 for node in nodes}
    after = {node.name: node.leads_to for node in nodes}
    for _ in nodes:
        moved = False
        for source, targets in after.items():
            for target in targets:
                if target in depth and depth[target] <= depth[source]:
                    depth[target], moved = depth[source] + 1, True
        if not moved:
            break
    return depth


# --- drawing ---


def draw(directory: Path, workers: Sequence[str]) -> list[Path]:
    """Write a PNG and an HTML page with both pictures; where they are."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    events = [event for worker in workers for event in rpc.rpc_sync(worker, _noted)]
    directory.mkdir(parents=True, exist_ok=True)
    figure, (above, below) = plt.subplots(2, 1, figsize=(14, 10), height_ratios=[1, 1.6])
    _draw_timeline(above, events, workers)
    _draw_graph(below, workers)
    figure.tight_layout()
    png, svg, page = directory / "demo.png", directory / "demo.svg", directory / "demo.html"
    figure.savefig(png, dpi=130)
    figure.savefig(svg)
    plt.close(figure)
    page.write_text(_page(svg.read_text(), events))
    svg.unlink()
    return [page, png]


def _draw_timeline(axes: Any, events: Sequence[Event], workers: Sequence[str]) -> None:
    start = min(event.begin for event in events)
    shown: set[str] = set()
    for event in sorted(events, key=lambda event: event.begin - event.end):  # long ones first, short ones on top
        label = event.what if event.what not in shown else None
        shown.add(event.what)
        begin, length = 1e3 * (event.begin - start), 1e3 * (event.end - event.begin)
        axes.barh(workers.index(event.worker), length, left=begin, height=0.7, color=COLOURS[event.what], label=label)
    axes.set_yticks(range(len(workers)), workers)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"Who did what, and when: {sum(event.what == 'step on all owners' for event in events)} training steps"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=6, frameon=False)


def _draw_graph(axes: Any, workers: Sequence[str]) -> None:
    depth = _layers(_graph)
    places: dict[str, tuple[float, float]] = {}
    taken: dict[tuple[int, int], int] = {}
    for node in _graph:
        row, column = workers.index(node.worker), depth[node.name]
        used = taken[row, column] = taken.get((row, column), -1) + 1
        places[node.name] = (float(column), row + 0.28 * used - 0.2)
    for row, worker in enumerate(workers):
        axes.axhspan(row - 0.45, row + 0.45, color="#f3f4f6" if row % 2 else "#e9ebef", zorder=0)
        axes.text(-1.2, row, worker, ha="right", va="center", weight="bold")
    for edge in _edges():
        crossing = edge.source.startswith("recv")
        style = {
            "arrowstyle": "->",
            "color": COLOURS["backward"] if crossing else "#9097a3",
            "lw": 1.6 if crossing else 0.8,
        }
        axes.annotate("", places[edge.target], places[edge.source], arrowprops=style)
    for node in _graph:
        colour = {"Send": "#fde2c8", "Recv": "#fbc8b8", "AccumulateGrad": "#d6efdf"}.get(node.label, "white")
        box = {"boxstyle": "round,pad=0.25", "fc": colour, "ec": "#70757f", "lw": 0.7}
        label = "leaf" if node.label == "AccumulateGrad" else node.label
        axes.text(*places[node.name], label, ha="center", va="center", fontsize=7, bbox=box)
    axes.set_xlim(-2.6, max(depth.values()) + 1)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.axis("off")
    axes.set_title("The way of the gradients in one step: from the loss, across workers (red), to the leaves")


def _edges() -> list[Edge]:
    known = {node.name for node in _graph}
    return [Edge(node.name, target) for node in _graph for target in node.leads_to if target in known]


def _page(svg: str, events: Sequence[Event]) -> str:
    rows = []
    for worker, what in dict.fromkeys((event.worker, event.what) for event in events):
        took = [1e3 * (event.end - event.begin) for event in events if (event.worker, event.what) == (worker, what)]
        mean = sum(took) / len(took)
        rows.append(f"<tr><td>{html.escape(worker)}<td>{html.escape(what)}<td>{len(took)}<td>{mean:.2f} ms</tr>")
    table = f"<table><tr><th>worker<th>what<th>times<th>mean</tr>{''.join(rows)}</table>"
    style = (
        "body{font:15px sans-serif;max-width:1200px;margin:2em auto}"
        "svg{width:100%;height:auto}td,th{padding:2px 1em;text-align:left}"
    )
    picture = svg[svg.index("<svg") :]
    return f"<!doctype html><meta charset=utf-8><title>Telegrad demo</title><style>{style}</style>{picture}{table}\n"
