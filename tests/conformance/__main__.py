"""Runs the suites and prints a table: passed, failed and skipped for each."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# One thread, so that forking this process is sound; right for several ranks on few cores, too.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these suites need none, and a process that has looked at one cannot be forked

_SAMPLE = 12  # one test in so many of a large suite; of a small one, all
_SMALL = 5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("-k", metavar="PART", action="append", help="only tests whose name contains this")
    parser.add_argument("-j", type=int, default=2, help="tests at the same time (default 2)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a test may take (default 60)")
    parser.add_argument("--repeat", type=int, default=1, help="run each test so often")
    parser.add_argument("--sample", action="store_true", help="a part of each suite")
    parser.add_argument("--others", action="store_true", help="only tests that are not expected to pass")
    parser.add_argument("--logs", type=Path, help="folder for the output of failed tests")
    return parser.parse_args()


def _choose(cases: dict[str, Any], tests_of: Any, listed: dict[str, str], chosen: argparse.Namespace) -> list[Any]:
    found = []
    for name, case in cases.items():
        tests = [test for test in tests_of(case) if (f"{name}.{test}" in listed) == chosen.others]
        if chosen.sample and len(tests) > _SMALL:
            tests = tests[::_SAMPLE]
        found += [(case, test) for test in tests if not chosen.k or any(part in f"{name}.{test}" for part in chosen.k)]
    return found * chosen.repeat


def main() -> int:
    """Run what the arguments ask for; 0 if all passed that should."""
    chosen = _arguments()
    from tests.conformance.suites import load, not_expected, tests_of

    cases, listed = load(), not_expected()
    from tests.conformance.trial import FAILED, PASSED, SKIPPED, Trial

    waiting = _choose(cases, tests_of, listed, chosen)
    counts = {name: Counter[str]() for name in cases}
    running: list[Trial] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        try:
            number = 0
            while waiting or running:
                while waiting and len(running) < chosen.j:
                    case, test = waiting.pop(0)
                    place = Path(folder, str(number))
                    place.mkdir()
                    number += 1
                    running.append(Trial(case, test, place, chosen.timeout))
                for trial in [trial for trial in running if trial.poll()]:
                    running.remove(trial)
                    counts[trial.name.partition(".")[0]][str(trial.outcome)] += 1
                    if trial.outcome == FAILED or chosen.others:
                        print(f"{trial.outcome} after {trial.seconds:.1f} s: {trial.name}: {trial.detail}", flush=True)
                    if trial.outcome == FAILED and chosen.logs:
                        chosen.logs.mkdir(parents=True, exist_ok=True)
                        (chosen.logs / f"{trial.name}.log").write_text(trial.log())
                time.sleep(0.005)
        finally:
            for trial in running:
                trial.stop()
    print(f"\n{'suite':34}{'passed':>8}{'failed':>8}{'skipped':>9}{'not expected':>14}")
    for name, count in counts.items():
        expected = sum(f"{name}.{test}" in listed for test in tests_of(cases[name]))
        print(f"{name:34}{count[PASSED]:8}{count[FAILED]:8}{count[SKIPPED]:9}{expected:14}")
    total = sum(counts.values(), Counter[str]())
    print(f"{'all':34}{total[PASSED]:8}{total[FAILED]:8}{total[SKIPPED]:9}{len(listed):14}")
    print(f"{time.monotonic() - started:.0f} s")
    return int(bool(total[FAILED]) and not chosen.others)


if __name__ == "__main__":
    sys.exit(main())
