"""`telegrad trace`, `dashboard` and `top`, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.trace_file import check

SCRIPT = """
import time, torch, telegrad
from telegrad import rpc
with telegrad.local_cluster(workers=2):
    for _ in range(3):
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        time.sleep(0.3)
    {more}
"""


def telegrad(*arguments: str, **options) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "telegrad", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, **options)


@pytest.mark.slow
def test_a_script_is_traced_without_a_change(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(more=""))
    done = telegrad("trace", "-o", str(tmp_path / "out.json"), str(script))
    assert done.returncode == 0, done.stderr
    timeline = json.loads((tmp_path / "out.json").read_text())
    check(timeline)
    assert len([e for e in timeline["traceEvents"] if e["name"] == "_VariableFunctionsClass.add → worker1"]) >= 2


@pytest.mark.slow
def test_a_script_has_a_dashboard_that_top_finds(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    script = tmp_path / "script.py"
    look = "import subprocess, sys; print(subprocess.run([sys.executable, '-m', 'telegrad', 'top', '--once'], "
    look += "capture_output=True, text=True, timeout=30).stdout)"
    script.write_text(SCRIPT.format(more=look))
    done = telegrad("dashboard", str(script))
    assert "the dashboard is at http://127.0.0.1:" in done.stderr
    assert "2 of 2 up" in done.stdout and "worker1" in done.stdout
    gone = telegrad("top", "--once")
    assert gone.returncode == 1 and "no job of yours runs" in gone.stderr
