"""How a worker's program ends that does not call `shutdown`, as the others are told: real interpreters, real ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from telegrad import rpc
from telegrad.errors import WorkerDied
from telegrad.rpc.job.ending import ending_by
from tests.cluster import end, join, process

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


# --- processes of multiprocessing, which leave without what `atexit` has registered ---

_go = threading.Event()


def _let_go() -> None:
    _go.set()


def _work(name: str, meeting: str) -> None:
    join(name, -1, None, meeting, {})
    _go.wait(60)
    if name == "raises":
        raise ValueError("bad input")
    if name == "exits":
        try:
            raise KeyError("part")
        except KeyError:
            sys.exit(3)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing(tmp_path: Path, method: str) -> None:
    meeting = f"file://{tmp_path}/meeting"
    expected = {
        "returns": "exited without calling rpc.shutdown()",
        "raises": "ended by ValueError: bad input (incarnation",
        "exits": "exited with status 3 without calling rpc.shutdown(), after KeyError: 'part'",
    }
    context = multiprocessing.get_context(method)
    started = [context.Process(target=_work, args=(name, meeting), daemon=True) for name in expected]
    for each in started:
        each.start()
    try:
        join("watcher", -1, None, meeting, {})
        for name, said in expected.items():
            reach(name)
            rpc.rpc_async(name, _let_go)
            # What it raised is not to be seen from Python 3.13 on.
            assert (said if sys.version_info < (3, 13) else expected["returns"]) in death_of(name)
    finally:
        end(started, patience=0)
        rpc.shutdown(graceful=False)


def test_threads_that_the_process_waits_for_may_go_on(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    other = process(_leave_to_a_thread, meeting)
    try:
        join("watcher", -1, None, meeting, {})
        reach("threaded")
        rpc.rpc_sync("threaded", _let_go)
        assert _heard.wait(60)
    finally:
        end([other], patience=0)
        rpc.shutdown(graceful=False)


_heard = threading.Event()


def _hear() -> None:
    _heard.set()


def _leave_to_a_thread(meeting: str) -> None:
    join("threaded", -1, None, meeting, {})
    main = threading.current_thread()

    def call_when_it_waits() -> None:
        while "_shutdown" not in _functions_of(main):
            time.sleep(0.01)
        rpc.rpc_sync("watcher", _hear)

    threading.Thread(target=call_when_it_waits).start()
    _go.wait(60)


def _functions_of(thread: threading.Thread) -> set[str]:
    frame = sys._current_frames().get(thread.ident or 0)
    found = set()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return found


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


def test_a_status_after_an_exception() -> None:
    error = SystemExit(2)
    error.__context__ = ValueError("patient 17")
    assert ending_by(error) == "exited with status 2 without calling rpc.shutdown(), after ValueError: patient 17"
    assert ending_by(error, tells_text=False).endswith("rpc.shutdown(), after ValueError")
    error.__context__ = ValueError("x" * 300)
    assert ending_by(error).endswith("xxx...")
