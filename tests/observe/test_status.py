"""`telegrad status` shows the workers of a running job: once, as a table or as JSON."""

import json
import os
import signal
from pathlib import Path

import pytest

from telegrad import rpc
from telegrad.cli import main
from telegrad.cli.status import in_words
from tests.cluster import cluster
from tests.waiting import stop_process


def test_the_table() -> None:
    up = {"worker": "ps", "rank": 0, "state": "up", "pid": 7, "host": "a", "address": "10.0.0.1:4000"}
    up |= {"uptime": 3725.0, "made": 12, "served": 3400, "running": 1, "memory": 210 * 2**20}
    gone = {"worker": "trainer0", "rank": 1, "state": "silent", "pid": 8, "address": "this host only"}
    text = in_words({"workers": [up, gone], "deadlocks": ["ps waits for itself"]})
    lines = text.splitlines()
    assert lines[0] == "1 of 2 workers answer"
    assert lines[2].split() == [
        "worker",
        "rank",
        "state",
        "pid",
        "host",
        "address",
        "uptime",
        "made",
        "served",
        "running",
        "memory",
    ]
    assert "1 h 02 m" in lines[3] and "3,400" in lines[3] and "210 MiB" in lines[3]
    assert lines[4].split()[:3] == ["trainer0", "1", "silent"]
    assert "too busy to answer" in text and text.endswith("DEADLOCK: ps waits for itself\n")


@pytest.mark.slow
def test_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status"]) == 1
    assert "no job of yours runs on this host" in capsys.readouterr().err
    with cluster(3) as job:
        for _ in range(5):
            rpc.rpc_sync("worker1", pow, (2, 3))
        assert main(["status", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["workers"]
        assert [row["worker"] for row in rows] == job.names
        assert {row["state"] for row in rows} == {"up"}
        assert rows[0]["pid"] == os.getpid() and rows[0]["made"] >= 5 and rows[1]["served"] >= 5
        assert all(row["memory"] > 2**20 and row["uptime"] >= 0 and row["address"] for row in rows)
        victim = job.processes[1].pid
        assert victim is not None
        stop_process(victim)
        try:
            assert main(["status"]) == 1
        finally:
            os.kill(victim, signal.SIGCONT)
        out = capsys.readouterr().out
        assert out.startswith("2 of 3 workers answer") and "silent" in out
