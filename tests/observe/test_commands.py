"""`telegrad trace`, `dashboard` and `top`, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad.cli import main
from tests.observe.trace_file import check

SCRIPT = """
import contextlib, io, time, torch, telegrad
from telegrad import rpc
from telegrad.cli import main
from telegrad.observe.automatic import Automatic
from telegrad.rpc.current import require_agent
with telegrad.local_cluster(workers=2):
    while len(require_agent().layer(Automatic)._ends) < 2:  # until the recording and the page have begun
        time.sleep(0.01)
    for _ in range(3):
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
    for _ in range(10):  # workers that do not answer within two seconds are not up
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            main(["top", "--once"])  # an observer of this job, in this process
        if "2 of 2 up" in shown.getvalue():
            break
    print(shown.getvalue())
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_is_traced_has_a_dashboard_and_is_found_by_top(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "telegrad", "trace", "-o", str(tmp_path / "out.json"), str(script)]
    environment = {**os.environ, "TELEGRAD_DASHBOARD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "the dashboard is at http://127.0.0.1:" in done.stderr
    assert "2 of 2 up" in done.stdout and "worker1" in done.stdout
    timeline = json.loads((tmp_path / "out.json").read_text())
    check(timeline)
    assert len([e for e in timeline["traceEvents"] if e["name"] == "torch.add → worker1"]) == 3
    for what in ("top", "dashboard"):
        assert main([what, *(["--once"] if what == "top" else [])]) == 1
        assert "no job of yours runs" in capsys.readouterr().err
