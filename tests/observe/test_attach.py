"""An observer of a job that runs: found by the files of its workers or by where they meet; nobody waits for it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from telegrad import rpc, trace
from telegrad.errors import TelegradError
from telegrad.observe.announcement import announcements, choose, folder
from telegrad.observe.attach import attached, has_ended
from telegrad.observe.live.board import Board
from telegrad.observe.service import observation_of
from telegrad.rpc.current import require_agent
from tests.cluster import cluster
from tests.waiting import wait_until

RUN = """
import time, torch
from telegrad import rpc
rpc.init_rpc(__import__("os").environ["TELEGRAD_NAME"])
deadline = time.monotonic() + 150
if rpc.get_worker_info().id == 0:
    import os
    print("meeting", os.environ["MASTER_PORT"], os.environ["TELEGRAD_SECRET"], flush=True)
    while not os.path.exists(os.environ["STOP"]) and time.monotonic() < deadline:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        time.sleep(0.01)
rpc.shutdown()
"""


def recording() -> bool:
    return trace.recorder is not None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers of this test announce themselves here, and those of other programs on this host do not."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_an_observer_sees_all_and_is_missed_by_none(here, caplog):
    with cluster(3) as job:
        with attached() as agent:
            assert sorted(m.name for m in agent.directory.members()) == job.names
            board = Board(agent, seconds=0.05)
            board.start()
            for _ in range(20):
                rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
            wait_until(lambda: any(link["total"] for link in board.state["links"]))
            wait_until(lambda: board.state["totals"]["up"] == 3)
            assert [w["name"] for w in board.state["workers"]] == job.names
            board.close()
            assert not rpc.rpc_sync("worker2", recording)
            # One that is no member is found by nobody, and is at no barrier.
            assert sorted(info.name for info in rpc.get_worker_infos()) == job.names
            job.kill("worker2")
            wait_until(lambda: any(agent.is_dead(m) for m in agent.directory.members()), 60)
            assert not has_ended(agent)
        wait_until(lambda: observation_of(require_agent()).recent)
        assert {text for _, _, text in observation_of(require_agent()).recent} == {"worker2 is gone"}
    assert not list(announcements()) and not list(folder().iterdir())
    assert "observer" not in caplog.text


@pytest.mark.slow
def test_an_observer_that_is_killed_leaves_no_recording_on(here):
    program = (
        "import time; from telegrad.observe.attach import attached; from telegrad.observe.live.board import Board\n"
        "with attached() as agent:\n    board = Board(agent); board.start(); print('looks', flush=True); time.sleep(99)"
    )
    with cluster(2):
        observer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        try:
            assert observer.stdout is not None and observer.stdout.readline() == "looks\n"
            wait_until(lambda: recording() and rpc.rpc_sync("worker1", recording))
        finally:
            observer.kill()
            observer.communicate()
        wait_until(lambda: not recording() and not rpc.rpc_sync("worker1", recording))


@pytest.mark.slow
def test_a_job_of_telegrad_run_is_found_by_process_and_by_address(here, monkeypatch):
    script = here / "job.py"
    script.write_text(RUN)
    command = [sys.executable, "-m", "telegrad", "run", "-n", "2", str(script)]
    stop = here / "stop"
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "STOP": str(stop)}, start_new_session=True
    )
    try:
        assert run.stdout is not None
        *_, port, secret = run.stdout.readline().split()
        with pytest.raises(TelegradError, match="that this secret opens"), attached(f"tcp://127.0.0.1:{port}"):
            pass
        monkeypatch.setenv("TELEGRAD_SECRET", secret)
        with attached(f"tcp://127.0.0.1:{port}") as agent:
            assert sorted(m.name for m in agent.directory.members()) == ["worker0", "worker1"]
        monkeypatch.delenv("TELEGRAD_SECRET")
        wait_until(lambda: len(list(announcements())) == 2)
        assert str(choose()).endswith("job.py (worker0, worker1)")
        with pytest.raises(TelegradError, match=r"no worker of yours.*\n.*job\.py"):
            choose(1)
        with attached(str(choose().pid)) as agent:
            assert len(agent.directory.members()) == 2
            stop.touch()
            wait_until(lambda: has_ended(agent))
        assert run.wait(100) == 0
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        if run.stdout is not None:
            run.stdout.close()
    with pytest.raises(TelegradError, match="no job of yours runs"):
        choose()
