"""However a worker's program ends, its process ends with it and leaves nothing: no hang, no file, no shared memory.

Each ending is a program of its own, started as a user would start it. Its worker serves a call of its own that never
returns, so that there is something to hang on.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PATIENCE = 120.0  # for a process that imports torch on a busy machine; a hang would take for ever

BEGINNING = """
import os, signal, sys, threading, time
import torch
from telegrad import rpc
options = rpc.RpcBackendOptions(init_method="file://" + sys.argv[1], heartbeat=0.5)

def never():
    threading.Event().wait()

if __name__ == "__main__":
    rank = int(sys.argv[2])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        rpc.shutdown()
        sys.exit()
    big = rpc.rpc_sync("worker1", torch.ones, args=(100_000,))  # there is shared memory to leave behind
    future = rpc.rpc_async("worker0", never)
    open(sys.argv[1] + ".ready", "w").close()
"""

ENDINGS = {
    "the end of the program": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise ValueError('on purpose')", 1),
    "Ctrl-C while waiting": ("future.wait()", -signal.SIGINT),
    "Ctrl-C in a call": ("rpc.rpc_sync('worker1', never)", -signal.SIGINT),
    "not graceful": ("rpc.shutdown(graceful=False)", 0),
    "SIGTERM": ("time.sleep(60)", -signal.SIGTERM),
    "SIGKILL": ("time.sleep(60)", -signal.SIGKILL),
}


LONG = ("an exception", "Ctrl-C while waiting", "SIGTERM")  # as others end


@pytest.mark.parametrize("ending", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in ENDINGS])
def test_the_process_ends_and_leaves_nothing(ending: str, tmp_path: Path) -> None:
    code, status = ENDINGS[ending]
    script = tmp_path / "program.py"
    script.write_text(BEGINNING + "    " + code + "\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared_before = _shared_memory()
    processes = [_start(script, tmp_path / "meeting", rank, temporary) for rank in (0, 1)]
    try:
        if status < 0:
            _await(tmp_path / "meeting.ready")
            time.sleep(0.1 if status == -signal.SIGINT else 0.0)  # to be in the middle of the wait, usually
            processes[0].send_signal(-status)
        assert _status(processes[0]) in (status, 1 if status == -signal.SIGINT else status)
        assert _status(processes[1]) == 0  # which waited in its shutdown for the other
    finally:
        for each in processes:
            each.kill()
            each.wait()
    left = [path for path in temporary.rglob("*") if path.is_file()]
    if status in (-signal.SIGTERM, -signal.SIGKILL):  # no code of its ran: whoever looks next removes how it is found
        left = [path for path in left if path.parent.name != "workers"]
    assert left == []
    assert _shared_memory() <= shared_before


def test_a_signal_explains_a_hang(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(BEGINNING + "    rpc.rpc_sync('worker1', never)\n")
    processes = [_start(script, tmp_path / "meeting", rank, tmp_path) for rank in (0, 1)]
    explained = threading.Event()
    try:
        _await(tmp_path / "meeting.ready")
        # Again and again: the first may find it on its way into the call.
        ask = threading.Thread(target=_signal_until, args=(processes[0], explained))
        ask.start()
        assert processes[0].stderr is not None
        seen = ""
        expected = ("for never() on worker 'worker1'", "worker1 could end it", "never() on worker 'worker0'")
        while not all(each in seen for each in expected):
            line = processes[0].stderr.readline()
            assert line, f"it ended and had said: {seen}"
            seen += line
    finally:
        explained.set()
        for each in processes:
            each.kill()
            each.communicate()


def _signal_until(process: "subprocess.Popen[str]", explained: threading.Event) -> None:
    process.send_signal(signal.SIGUSR1)
    while not explained.wait(1.0):
        process.send_signal(signal.SIGUSR1)


def _start(script: Path, meeting: Path, rank: int, temporary: Path) -> "subprocess.Popen[str]":
    environment: dict[str, Any] = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(meeting), str(rank)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _status(process: "subprocess.Popen[str]") -> int:
    _, said = process.communicate(timeout=PATIENCE)
    print(said)  # shown if the status is not the expected one
    return process.returncode


def _await(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir() if "telegrad" in entry.name} if folder.exists() else set()
