"""Type checkers see what users write as it is: right uses pass, each wrong one is an error in the editor."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

USES = Path(__file__).with_name("uses.py")
ROOT = Path(__file__).parents[2]
WRONG = {number for number, line in enumerate(USES.read_text().splitlines(), 1) if line.endswith("# wrong")}


def reported_by_mypy() -> dict[int, str]:
    # With the project's own settings, so that what `make check` found out about torch need not be found out again.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(USES)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert not output.stderr, output.stderr
    found = re.findall(r"uses\.py:(\d+): error: (.*)", output.stdout)
    return {int(line): text for line, text in found}


def reported_by_pyright(tmp_path: Path) -> dict[int, str]:
    settings = {
        "include": [str(USES)],
        "extraPaths": [str(ROOT / "src")],
        "typeCheckingMode": "standard",
        "reportUnusedExpression": False,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "-p",
        str(tmp_path),
    ]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    problems = json.loads(output.stdout)["generalDiagnostics"]
    return {p["range"]["start"]["line"] + 1: p["message"] for p in problems if p["severity"] == "error"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_right_uses_pass_and_wrong_ones_do_not(checker: str, tmp_path: Path) -> None:
    reported = reported_by_mypy() if checker == "mypy" else reported_by_pyright(tmp_path)
    assert {line: text for line, text in reported.items() if line not in WRONG} == {}
    assert WRONG - reported.keys() == set()
