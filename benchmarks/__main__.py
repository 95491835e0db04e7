"""`python -m benchmarks`: measure, print the table, save what was asked for. `--help` says what can be chosen."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import apis, cases, cluster, cuda, footprint, harness, limits, plot, report, tls

PLOT = Path("docs/benchmarks.png")
REGIONS = "regions"
CUDA = "cuda"
BYTECODES = "bytecodes"
TLS = "tls"
ALONE_DEADLINE = 300.0
FOOTPRINTS = {case.key: case for case in (footprint.IMPORT, footprint.IDLE_MEMORY)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.cases == [CUDA]:
        cuda.main([*options.impl, cuda.BLOCKS])
        return 0
    if options.cases == [TLS]:
        return tls.main(options.quick)
    # Ended politely, this process would leave without ending its workers in order: make it an ordinary interrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster.preload()
    base = json.loads(options.base.read_text()) if options.base else None
    try:
        measured = _measure(options, base)
    except KeyboardInterrupt:
        print("interrupted; all workers are ended", file=sys.stderr)
        return 130
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
        print(f"saved {options.json}")
    if options.plot:
        try:
            drawn = plot.draw(measured["cases"], measured["machine"], PLOT)
            print(f"saved {PLOT}" if drawn else "no plot: no case has both implementations")
        except ImportError:
            print("no plot: matplotlib is not installed")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = [*cases.BY_KEY, *FOOTPRINTS, REGIONS, BYTECODES, CUDA, TLS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=f"cases: {', '.join(known)}"
    )
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), help="cases or groups (core, tcp, also), by commas"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds; the core cases unless others are named"
    )
    parser.add_argument("--base", type=Path, help="a saved run to compare with")
    parser.add_argument("--json", type=Path, help="where to save this run")
    parser.add_argument("--plot", action="store_true", help=f"draw {PLOT}")
    parser.add_argument("--impl", type=lambda text: text.split(","), default=["torch", "telegrad"], help="by commas")
    options = parser.parse_args(arguments)
    options.cases = options.cases or (["core"] if options.quick else ["core", "tcp", "also"])
    groups = {case.group for case in cases.ALL}
    for name in options.cases:
        if name not in known and name not in groups:
            parser.error(f"no case or group is called {name!r}; there are: {', '.join([*sorted(groups), *known])}")
    for name in options.impl:
        if name not in apis.BY_NAME:
            parser.error(f"no implementation is called {name!r}; there are: {', '.join(apis.BY_NAME)}")
    for name in apis.OPTIONAL:
        if name in options.impl and not apis.importable(name):
            print(f"{name} is not installed: left out", file=sys.stderr)
            options.impl.remove(name)
    return options


def _measure(options: argparse.Namespace, base: dict[str, Any] | None) -> dict[str, Any]:
    plan = harness.QUICK if options.quick else harness.FULL
    machine = report.machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    floor = limits.measure(options.quick)
    print("\n".join(f"limit: {line}" for line in floor.lines()), flush=True)
    earlier = {record["case"]: record for record in base["cases"]} if base else {}
    records = []

    def take(line: harness.Line) -> None:
        record = report.record(line, floor)
        records.append(record)
        print("  " + "  ".join(report.row(record, options.impl, earlier.get(record["case"]), bool(base))), flush=True)

    chosen = set(options.cases)
    with harness.Harness(options.impl, plan) as workers:
        for case in cases.select(chosen):
            take(workers.run(case))
    for case in FOOTPRINTS.values():
        if chosen & {case.key, case.group}:
            take(footprint.run(case, options.impl, plan.rounds))
    rows = [report.row(record, options.impl, earlier.get(record["case"]), bool(base)) for record in records]
    print("\n" + report.table([report.head(options.impl, bool(base)), *rows]) + "\n")
    print(report.table(report.cpu_rows(records, options.impl)) + "\n")
    regions = _run_alone("benchmarks.regions", "many regions") if chosen & {REGIONS, "also"} else None
    counted = _run_alone("benchmarks.bytecodes", "work in Python") if chosen & {BYTECODES, "core"} else None
    return {
        "machine": machine,
        "limits": vars(floor),
        "cases": records,
        "regions": regions,
        "bytecodes": counted,
        "quick": options.quick,
    }


def _run_alone(module: str, title: str) -> str:
    """What is measured by a program of its own."""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=ALONE_DEADLINE, check=True)
        text = done.stdout.strip()
    except subprocess.TimeoutExpired:
        text = f"n/a: did not end within {ALONE_DEADLINE:.0f} s"
    except subprocess.CalledProcessError as error:
        text = f"n/a: {(error.stderr.strip().splitlines() or ['failed without a word'])[-1]}"
    print(f"{title}:\n{text}\n", flush=True)
    return text


if __name__ == "__main__":
    sys.exit(main())
