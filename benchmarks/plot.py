"""The picture for the README: how many times faster than torch.distributed.rpc, case by case, with bar and aim."""

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
    errors = [
        [max(0.0, ratio["median"] - ratio["low"]) for ratio in ratios],
        [max(0.0, ratio["high"] - ratio["median"]) for ratio in ratios],
    ]
    figure, axes = pyplot.subplots(figsize=(9, 0.36 * len(drawn) + 1.6))
    axes.barh(
        places, [ratio["median"] for ratio in ratios], xerr=errors, color="#3b7dd8", ecolor="#7f8c9b", height=0.62
    )
    axes.scatter(
        [record["bar"] for record in drawn], places, marker="|", s=180, color="#b3261e", label="at least", zorder=3
    )
    aims = [(record["aim"], place) for place, record in zip(places, drawn, strict=True) if record["aim"]]
    if aims:
        axes.scatter(
            [aim for aim, _ in aims],
            [place for _, place in aims],
            marker="|",
            s=180,
            color="#2e7d32",
            label="aim",
            zorder=3,
        )
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [record["title"] for record in drawn])
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    # One wild round must not squeeze all the bars.
    longest = max([ratio["median"] for ratio in ratios] + [record["aim"] or record["bar"] for record in drawn])
    axes.set_xlim(0, 1.2 * longest)
    axes.set_xlabel("times faster than torch.distributed.rpc (whiskers: rounds)")
    axes.set_title(f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}", fontsize=9)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
