"""What the examples show while they run and when they are done: a progress bar and a plot.

The bar is rich's in a terminal. Where there is no terminal, or no rich, it is a line of text now and then. A plot is a
picture in the folder `--output`; without matplotlib a line says what is missing. Both come with the extra `demo`.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BLUE, RED, GREEN, ORANGE, PURPLE, GREY = "#3b76d6", "#e4572e", "#3aa76d", "#f2a65a", "#8e6cc9", "#c9ced6"
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE)
_LINES = 10  # how many lines stand for a bar where there is no terminal


class Bar:
    """The progress of `total` steps: `with Bar(100) as bar`, then `bar.show(step, "loss 0.3")` after each."""

    def __init__(self, total: int, what: str = "step") -> None:
        self._total, self._what = total, what
        self._begun = time.monotonic()
        self._rich: Any = None

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
            except ImportError:
                return self
            columns = (TextColumn(self._what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._rich = Progress(*columns, TextColumn("{task.description}"))
            self._rich.start()
            self._task = self._rich.add_task("", total=self._total)
        return self

    def show(self, done: int, text: str = "") -> None:
        """So many steps are done."""
        if self._rich is not None:
            self._rich.update(self._task, completed=done, description=text)
        elif done == self._total or done % max(1, self._total // _LINES) == 0:
            print(f"{self._what} {done}/{self._total}  {text}  {time.monotonic() - self._begun:.0f} s", flush=True)

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._rich is not None:
            self._rich.stop()


def picture(path: Path, draw: Callable[..., None], panels: int = 1, width: float = 8.0) -> None:
    """Have `draw` fill that many panels side by side, and save them; matplotlib is asked for only here."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot without matplotlib: pip install 'telegrad[demo]'")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure, axes = plt.subplots(1, panels, figsize=(width, 4), layout="constrained", squeeze=False)
    draw(*axes[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"see {path}")


def curves(axes: Any, series: Mapping[str, Sequence[float]], x: str, y: str, title: str, scale: str = "linear") -> None:
    """Learning curves; a long and noisy one is drawn faintly below its running mean."""
    for colour, (name, values) in zip(COLOURS, series.items(), strict=False):
        steps = range(1, len(values) + 1)
        window = len(values) // 20
        if window > 1:
            axes.plot(steps, values, color=colour, lw=0.8, alpha=0.3)
        axes.plot(steps, running_mean(values, window), color=colour, lw=1.8, label=name)
    axes.set(xlabel=x, ylabel=y, title=title, yscale=scale)
    if len(series) > 1:
        axes.legend()


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Each value's mean with its neighbours, about `window` in all."""
    near = [values[max(0, i - window // 2) : i + window // 2 + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in near]


# --- a timeline that `telegrad.observe.record` wrote ---

KINDS = {"forward": BLUE, "backward": RED, "gradient": ORANGE, "optimizer": GREEN, "wait": GREY, "run": PURPLE}
_NAMES = {"forward": "calls in the context", "gradient": "gradients taken", "run": "other calls"}


def load_timeline(path: Path) -> dict[str, Any]:
    """What was recorded."""
    timeline: dict[str, Any] = json.loads(path.read_text())
    return timeline


def workers_of(timeline: dict[str, Any]) -> dict[int, str]:
    """The workers' names by the numbers they have there."""
    return {e["pid"]: e["args"]["name"].split()[0] for e in timeline["traceEvents"] if e["name"] == "process_name"}


def slices_of(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    """What is drawn, long ones first, so that short ones lie on top."""
    found = [
        event
        for event in timeline["traceEvents"]
        if event["ph"] == "X" and event["cat"] in KINDS and "until answered" not in event["name"]
    ]
    own = [e for e in found if e["cat"] != "gradient" or " → " not in e["name"]]  # where it ran, not where it was sent
    return sorted(own, key=lambda event: -event["dur"])


def draw_timeline(axes: Any, timeline: dict[str, Any], title: str) -> None:
    """Who did what, a row for each worker."""
    workers = workers_of(timeline)
    shown: set[str] = set()
    for event in slices_of(timeline):
        kind = event["cat"]
        label = _NAMES.get(kind, kind) if kind not in shown else None
        shown.add(kind)
        row, height = list(workers).index(event["pid"]), 0.35 if kind == "wait" else 0.7
        axes.barh(row, event["dur"] / 1e3, left=event["ts"] / 1e3, height=height, color=KINDS[kind], label=label)
    axes.set_yticks(range(len(workers)), list(workers.values()))
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title=title)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    ordered = [_NAMES.get(kind, kind) for kind in KINDS if kind in shown]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 6, "frameon": False}
    axes.legend([handles[name] for name in ordered], ordered, handlelength=1, columnspacing=1, fontsize=8, **place)
