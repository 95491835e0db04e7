"""`telegrad run` and torchrun start the same script; failures and signals end all of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TALK = """
import os, sys
import torch
from telegrad import rpc

def double(x):
    return x * 2

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    print("answer", rpc.rpc_sync("worker1", double, args=(torch.tensor(21),)).item(), *sys.argv[1:])
rpc.shutdown()
"""

TELEGRAD = [sys.executable, "-m", "telegrad", "run", "-n", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.mark.parametrize("launcher", [TELEGRAD, TORCHRUN], ids=["telegrad", "torchrun"])
def test_a_script_finds_its_job(launcher: list[str], script: Path) -> None:
    script.write_text(TALK)
    done = subprocess.run(
        [*launcher, str(script), "--flag", "x"], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = "answer 42 --flag x"
    assert any(line.removeprefix("[worker0] ") == expected for line in done.stdout.splitlines()), done.stdout


def test_the_first_failure_ends_all(script: Path) -> None:
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n")
    done = subprocess.run([*TELEGRAD, str(script)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 7
    assert "worker1 ended with status 7; ending the others" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_workers(number: signal.Signals, script: Path) -> None:
    script.write_text(
        "import signal, sys, time\n"
        "def leave(number, frame):\n    print('leaving by', number)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, leave), signal.signal(signal.SIGTERM, leave)\n"
        "print('ready')\ntime.sleep(600)\n"
    )
    with subprocess.Popen([*TELEGRAD, str(script)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        ready = {run.stdout.readline() for _ in range(2)}
        assert ready == {"[worker0] ready\n", "[worker1] ready\n"}
        run.send_signal(number)
        out, _ = run.communicate(timeout=150)
    assert sorted(out.splitlines()) == [f"[worker{rank}] leaving by {int(number)}" for rank in range(2)]
    assert run.returncode == 128 + number


def test_names_and_variables(script: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TELEGRAD_NAME")
    script.write_text(f"import os\nprint(*[os.environ[n] for n in {names}], len(os.environ['TELEGRAD_SECRET']))\n")
    done = subprocess.run(
        [*TELEGRAD, "--name-prefix", "ps", str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
        env={**os.environ, "RANK": "5"},
    )
    assert sorted(done.stdout.splitlines()) == ["[ps0] 0 0 2 ps0 64", "[ps1] 1 1 2 ps1 64"]


def test_a_seed_is_each_workers_own(script: Path) -> None:
    script.write_text(
        "import os\nimport torch\nimport telegrad.rpc as rpc\n"
        "print('drew', os.environ['RANK'], torch.rand(1).item())\n"
        "with rpc.init_rpc(f\"worker{os.environ['RANK']}\"):\n    pass\n"
    )
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [*TELEGRAD, "--seed", "3", str(script)], capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append(sorted(line.partition("drew")[2] for line in done.stdout.splitlines() if "drew" in line))
    assert outputs[0] == outputs[1]
    assert len({line.split()[1] for line in outputs[0]}) == 2


RESTARTED = """
import os, sys
from telegrad import rpc

def who():
    return os.environ["TELEGRAD_RESTART"]

rpc.init_rpc()
if os.environ["RANK"] == "1" and os.environ["TELEGRAD_RESTART"] != "2":
    os._exit(3)
if os.environ["RANK"] == "0":
    import time
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            found = rpc.rpc_sync("worker1", who)
        except (ConnectionError, TimeoutError):
            time.sleep(0.05)
            continue
        if found == "2":
            print("back after", found)
            break
rpc.shutdown(timeout=60)
"""


def test_a_worker_that_fails_is_started_again(script: Path) -> None:
    script.write_text(RESTARTED)
    done = subprocess.run(
        [*TELEGRAD, "--max-restarts", "2", str(script)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[worker0] back after 2" in done.stdout
    assert "[telegrad run] worker1 ended with status 3; restart 1 of 2 in 0.5 s" in done.stderr
    assert "restart 2 of 2 in 1 s" in done.stderr


def test_one_that_keeps_failing_ends_all(script: Path) -> None:
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(60)\n")
    done = subprocess.run(
        [*TELEGRAD, "--max-restarts", "1", str(script)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 5
    assert "worker1 ended with status 5 after 1 restarts; ending the others" in done.stderr


def test_one_that_ends_without_a_shutdown_is_named(script: Path) -> None:
    script.write_text("from telegrad import rpc\nrpc.init_rpc()\n")
    done = subprocess.run([*TELEGRAD, str(script)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "[telegrad run] worker1 exited normally without calling rpc.shutdown()" in done.stderr
