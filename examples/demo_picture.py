"""The page of the demo: how the network learned, and who did what in two steps, from the timeline that was recorded."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from showing import BLUE, RED, draw_timeline, load_timeline, slices_of, workers_of


def draw(directory: Path, losses: Sequence[float], accuracies: Sequence[float]) -> list[Path]:
    """Write a PNG and an HTML page beside the recorded timeline; where they are."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    timeline = load_timeline(directory / "timeline.json")
    figure, (curve, bars) = plt.subplots(2, 1, figsize=(12, 8), height_ratios=[1, 1.1], layout="constrained")
    _draw_curve(curve, losses, accuracies)
    draw_timeline(bars, timeline, "Who did what in two training steps, as telegrad.observe.record saw it")
    png, svg, page = directory / "demo.png", directory / "demo.svg", directory / "demo.html"
    figure.savefig(png, dpi=120)
    figure.savefig(svg)
    plt.close(figure)
    page.write_text(_page(svg.read_text(), timeline, accuracies))
    svg.unlink()
    return [page, png, directory / "timeline.json"]


def _draw_curve(axes: Any, losses: Sequence[float], accuracies: Sequence[float]) -> None:
    epochs = range(1, len(accuracies) + 1)
    steps = [1 + i * (len(accuracies) - 1) / max(1, len(losses) - 1) for i in range(len(losses))]
    axes.plot(steps, losses, color=BLUE, alpha=0.5, lw=1, label="loss of each step")
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    right.plot(epochs, [100 * a for a in accuracies], color=RED, marker="o", ms=3, label="held-out accuracy")
    right.set_ylabel("% right")
    right.set_ylim(0, 102)
    axes.set_title("Learning to read digits over three workers")
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="center right", frameon=False)


def _time(milliseconds: float) -> str:
    return f"{milliseconds * 1e3:.0f} µs" if milliseconds < 1 else f"{milliseconds:.1f} ms"


_SAID = {"_invoke": "a method of what is there", "on_owner": "asked to step"}  # names within Telegrad, for readers


def _page(svg: str, timeline: dict[str, Any], accuracies: Sequence[float]) -> str:
    workers = workers_of(timeline)
    took: dict[tuple[str, str], list[float]] = {}
    for event in sorted(slices_of(timeline), key=lambda e: (e["pid"], e["ts"])):
        what = _SAID.get(event["name"], event["name"])
        if not what.startswith("RRef"):  # Telegrad's own bookkeeping
            took.setdefault((workers[event["pid"]], what), []).append(event["dur"] / 1e3)
    rows = [
        f"<tr><td>{html.escape(worker)}<td>{html.escape(what)}<td>{len(times)}<td>{_time(sum(times) / len(times))}"
        for (worker, what), times in took.items()
    ]
    style = (
        ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;"
        "padding:0 1em}svg{width:100%;height:auto;background:#fff;border-radius:8px}table{border-collapse:collapse}"
        "td,th{padding:3px 1.2em 3px 0;text-align:left;border-bottom:1px solid #8884}"
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Telegrad demo</title><style>{style}</style><h1>Telegrad: one network over four processes</h1>"
        f"<p>{accuracies[-1]:.1%} of the digits that were held out are read right after {len(accuracies)} epochs. "
        "The whole timeline is in <a href=timeline.json>timeline.json</a>: open it at "
        "<a href=https://ui.perfetto.dev>ui.perfetto.dev</a>, where arrows lead from each call to where it ran.</p>"
        f"{svg[svg.index('<svg') :]}<h2>What the workers did, on average</h2>"
        f"<table><tr><th>worker<th>what<th>times<th>mean{''.join(rows)}</table></html>\n"
    )
