"""What the reader gets: a table, JSON, and the change against a saved baseline.

Records are plain dictionaries, the same that JSON holds, so that a saved run and a fresh one are printed and compared
alike.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import figures
from benchmarks.harness import Line, Measured
from benchmarks.limits import Limits

Record = dict[str, Any]
REFERENCE, OURS = "torch", "telegrad"


def record(line: Line, limits: Limits) -> Record:
    """One measured case as a record; costs are seconds (or megabytes) per operation."""
    case = line.case
    limit = limits.of(case)
    result: Record = {
        "case": case.key,
        "title": case.title if case.transport == "default" else f"{case.title}, over {case.transport.upper()}",
        "group": case.group,
        "unit": case.unit,
        "bar": case.bar,
        "aim": case.aim,
        "at_most": case.at_most,
        "limit": limit,
        "costs": {name: _cost(measured, case.operations) for name, measured in line.by_implementation.items()},
    }
    theirs, ours = line.by_implementation.get(REFERENCE), line.by_implementation.get(OURS)
    comparable = case.at_most is None and theirs and ours and not theirs.error and not ours.error
    if comparable and theirs and ours:
        ratio = figures.speed_up(theirs.rounds, ours.rounds)
        result["ratio"] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
    return result


def _cost(measured: Measured, operations: int) -> Record:
    if measured.error or not measured.rounds:
        return {"error": measured.error or "not measured"}
    spread = figures.cost(measured.rounds, operations)
    cost: Record = {"median": spread.median, "low": spread.low, "high": spread.high}
    if measured.cpu_caller:
        cost["cpu_caller"] = statistics.median(measured.cpu_caller)
        cost["cpu_others"] = statistics.median(measured.cpu_others)
    if measured.idle is not None:
        cost["idle"] = measured.idle
    return cost


def machine() -> Record:
    """Which machine and versions the figures belong to."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "telegrad": _version("telegrad"),
        "load": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "from source"


def head(implementations: Sequence[str], with_base: bool) -> list[str]:
    return [
        "case",
        *implementations,
        "ratio (low-high)",
        "bar",
        "aim",
        "of limit",
        *(["against base"] if with_base else []),
    ]


def row(record: Record, implementations: Sequence[str], base: Record | None, with_base: bool) -> list[str]:
    """A record as the cells of one line of the table."""
    costs, unit = record["costs"], record["unit"]
    cells = [record["title"]]
    for name in implementations:
        cost = costs[name]
        cells.append(_brief(f"n/a: {cost['error']}") if "error" in cost else figures.shown(cost["median"], unit))
    ratio = record.get("ratio")
    cells.append(f"{ratio['median']:.1f}x ({ratio['low']:.1f}-{ratio['high']:.1f}){_verdict(record)}" if ratio else "")
    cells.append(_bar(record))
    cells.append(f"{record['aim']:g}x" if record["aim"] else "")
    subject_name = OURS if OURS in implementations else implementations[0]
    subject = costs[subject_name]
    cells.append(f"{record['limit'] / subject['median']:.0%}" if record["limit"] and "median" in subject else "")
    before = (base or {}).get("costs", {}).get(subject_name, {})
    return [*cells, _change(subject, before)] if with_base else cells


def _brief(text: str, most: int = 70) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _bar(record: Record) -> str:
    if record["at_most"]:
        return f"at most {figures.shown(record['at_most'], record['unit'])}"
    return f"{record['bar']:g}x" if record["bar"] else ""


def _verdict(record: Record) -> str:
    ratio = record["ratio"]["median"]
    if record["aim"] and ratio >= record["aim"]:
        return " aim met"
    if record["bar"]:
        return " bar met" if ratio >= record["bar"] else " BELOW BAR"
    return ""


def _change(cost: Record, before: Record) -> str:
    """How the cost moved, and whether the rounds of the two runs lie apart."""
    if "median" not in before or "median" not in cost:
        return "new"
    change = f"{cost['median'] / before['median'] - 1:+.0%}"
    apart = cost["low"] > before["high"] or cost["high"] < before["low"]
    return change if apart else f"{change} (within the spread)"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown, with columns aligned for those who read it as text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def cpu_rows(records: Sequence[Record], implementations: Sequence[str]) -> list[list[str]]:
    """CPU time per operation on the calling worker and on the others together, per case and implementation."""
    rows = [["CPU per operation: caller + others", *implementations]]
    for record in records:
        costs = [record["costs"][name] for name in implementations]
        if any("cpu_caller" in cost for cost in costs):
            cells = [
                f"{cost['cpu_caller'] * 1e6:,.0f} + {cost['cpu_others'] * 1e6:,.0f} us"
                if "cpu_caller" in cost
                else "n/a"
                for cost in costs
            ]
            rows.append([record["title"], *cells])
    idle = [[record["costs"][name].get("idle", 0.0) for record in records] for name in implementations]
    rows.append(["all workers idle, share of a core at most", *(f"{max(shares, default=0.0):.1%}" for shares in idle)])
    return rows
