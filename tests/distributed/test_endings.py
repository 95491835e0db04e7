"""How a worker's program ends that does not call `shutdown`, as the others are told: real interpreters, real ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telegrad import rpc
from telegrad.errors import WorkerDied
from telegrad.rpc.job.ending import ending_by
from tests.cluster import join

pytestmark = pytest.mark.slow

# One interpreter imports torch; its children each join and end in a way of their own, at the top of their script.
SCRIPT = """
import os, sys, threading
from telegrad import rpc

def joined(name):
    options = rpc.RpcBackendOptions(init_method=sys.argv[1], rendezvous_timeout=60)
    return rpc.init_rpc(name, rpc_backend_options=options)

def wait():
    with os.fdopen(mine[0], "rb", closefd=False) as told:
        told.read(1)

name, code = "", ""
for name, code in ENDINGS.items():
    mine = os.pipe()
    print(name, mine[1], flush=True)
    if os.fork() == 0:
        break
else:
    sys.stdin.read()  # until the test has seen all of them end
    os._exit(0)
exec(code)
"""
JOIN = "joined(name); wait()"
BLOCK = "with joined(name):\n    wait()\n    "
ENDINGS = {
    "comes_to_its_end": (JOIN, "exited without calling rpc.shutdown()"),
    "exits": (f"{JOIN}; sys.exit(1)", "exited without calling rpc.shutdown()"),
    "fails": (f"{JOIN}; raise ValueError('bad input\\nand more')", "ended by ValueError: bad input (incarnation"),
    "is_interrupted": (f"{JOIN}; raise KeyboardInterrupt", "ended by KeyboardInterrupt (incarnation"),
    "exits_a_block": (f"{BLOCK}sys.exit(3)", "exited with status 3 without calling rpc.shutdown()"),
    "fails_in_a_block": (f"{BLOCK}raise KeyError('part')", "ended by KeyError: 'part' (incarnation"),
    "leaves_a_block": (f"{BLOCK}pass", "has shut down"),
    "has_caught_one": (f"{JOIN}\ntry: sys.exit(1)\nexcept SystemExit: pass", "exited without calling rpc.shutdown()"),
}


def test_the_others_are_told_how(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    script = tmp_path / "ends.py"
    script.write_text(SCRIPT.replace("ENDINGS", repr({name: code for name, (code, _) in ENDINGS.items()})))
    process = subprocess.Popen(
        [sys.executable, str(script), meeting],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        join("watcher", -1, None, meeting, {})
        write_ends = {}
        for _ in ENDINGS:
            name, number = process.stdout.readline().decode().split()
            write_ends[name] = f"/proc/{process.pid}/fd/{number}"
        for name, (_, expected) in ENDINGS.items():
            reach(name)
            with open(write_ends[name], "wb") as told:
                told.write(b"!")
            assert expected in death_of(name)
    finally:
        process.stdin.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        rpc.shutdown(graceful=False)


def reach(name: str) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            rpc.rpc_sync(name, os.getpid)
            return
        except ValueError:  # it has not joined yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def death_of(name: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            rpc.rpc_sync(name, os.getpid)
        except WorkerDied as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError(f"{name} has not ended")


def test_a_text_stays_where_peers_are_not_trusted() -> None:
    assert ending_by(ValueError("patient 17"), tells_text=False) == "ended by ValueError"


def test_a_message_instead_of_a_status_is_a_failure() -> None:
    assert "status 1" in ending_by(SystemExit("no input")) and "status" not in ending_by(SystemExit())
