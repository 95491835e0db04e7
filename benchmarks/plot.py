"""The picture for the README: how many times faster than torch.distributed.rpc, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Record


def draw(records: Sequence[Record], machine: Record, path: Path) -> bool:
    """Save the plot; False where there is nothing to draw. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [record for record in records if "ratio" in record and record["bar"]]
    if not drawn:
        return False
    places = range(len(drawn))
    ratios = [record["ratio"] for record in drawn]
    longest = max(ratio["median"] for ratio in ratios)
    most = 1.15 * longest  # of what is drawn: one wild round must not squeeze all the bars
    errors = [
        [max(0.0, ratio["median"] - ratio["low"]) for ratio in ratios],
        [max(0.0, min(ratio["high"], most) - ratio["median"]) for ratio in ratios],
    ]
    colours = ["#3b7dd8" if ratio["median"] >= 1 else "#e08a3c" for ratio in ratios]
    figure, axes = pyplot.subplots(figsize=(9, 0.36 * len(drawn) + 1.6))
    axes.barh(places, [ratio["median"] for ratio in ratios], xerr=errors, color=colours, ecolor="#7f8c9b", height=0.62)
    for place, ratio in zip(places, ratios, strict=True):
        right = max(ratio["median"], min(ratio["high"], most), 1.0)
        axes.text(right + 0.01 * longest, place, f" {ratio['median']:.1f}x", va="center", fontsize=9)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.annotate("as fast as torch", (1.0, -0.6), xytext=(4, 0), textcoords="offset points", fontsize=8)
    axes.set_yticks(places, [record["title"] for record in drawn])
    axes.set_ylim(len(drawn) - 0.4, -1.0)
    axes.set_xlim(0, 1.3 * longest)
    axes.set_xlabel(
        "times as fast as torch.distributed.rpc (orange: slower)\ngrey lines: from the lowest round to the highest"
    )
    axes.set_title(f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
