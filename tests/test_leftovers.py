"""The check that no test leaves anything running sees what it should, and nothing else."""

import subprocess
import sys
import threading

import pytest

from tests import leftovers
from tests.waiting import wait_until

WAIT_FOR_INPUT = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_a_child_is_seen_until_it_ends() -> None:
    before = leftovers.running_now()
    with subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE) as child:
        left = leftovers.left_since(before, patience=0)
        assert {pid for pid, _ in left.processes} == {child.pid}
        assert f"process {child.pid}" in str(left)
    assert not leftovers.left_since(before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt its orphaned descendants")
def test_an_orphan_is_seen_and_killed() -> None:
    before = leftovers.running_now()
    subprocess.run(["sh", "-c", "sleep 600 & exit 0"], check=True)
    wait_until(lambda: "sleep 600" in str(leftovers.left_since(before, patience=0)))
    leftovers.kill(leftovers.left_since(before, patience=0))
    assert not leftovers.left_since(before)


@pytest.mark.parametrize("daemon", [False, True])
def test_only_a_thread_that_holds_up_exit_is_seen(daemon: bool) -> None:
    before = leftovers.running_now()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=daemon)
    thread.start()
    seen = leftovers.left_since(before, patience=0).threads
    release.set()
    thread.join()
    assert seen == (frozenset() if daemon else {thread})
    assert not leftovers.left_since(before)
