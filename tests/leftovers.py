"""What a test left running: processes that descend from this one, threads that would hold up its exit, and the agent of
this process, with which no later test could become a worker.

A process whose parent died is not lost sight of: on Linux this process adopts the orphans among its descendants
(`adopt_orphans`). Where there is no /proc, only the children that `multiprocessing` knows are seen.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds for what is already ending; far above what a closing worker needs on a busy machine
_PR_SET_CHILD_SUBREAPER = 36
# Helpers that the standard library starts once and keeps for the life of a process.
_LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Processes of a browser come and go with its pages. What is a test's or a module's is the browser itself.
_OF_A_BROWSER = "/chromium --type="


@dataclass(frozen=True)
class Running:
    """The processes and threads of one moment. `a - b` is what `a` has and `b` had not."""

    processes: frozenset[tuple[int, str]]  # pid and start time: a reused pid is another process
    threads: frozenset[threading.Thread]

    def __sub__(self, before: "Running") -> "Running":
        return Running(self.processes - before.processes, self.threads - before.threads)

    def __bool__(self) -> bool:
        return bool(self.processes or self.threads)

    def __str__(self) -> str:
        lines = [f"process {pid}: {_command(pid) or 'just ended'}" for pid, _ in sorted(self.processes)]
        lines += [f"thread {thread.name}" for thread in self.threads]
        return "\n".join(lines)


def running_now() -> Running:
    """What descends from this process, and its threads that are neither daemonic nor the main one."""
    threads = frozenset(t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread())
    return Running(frozenset(_descendants(os.getpid())), threads)


def left_since(before: Running, patience: float = PATIENCE) -> Running:
    """What was not there `before` and still runs once `patience` is over; returns at once when nothing does."""
    deadline = time.monotonic() + patience
    while (left := running_now() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def kill(left: Running) -> None:
    """End processes that a test forgot, so that the next test is not the one to suffer."""
    for pid, _ in left.processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself meanwhile


def agent_now() -> Any:
    """The agent of this process, or None."""
    current = sys.modules.get("telegrad.rpc.current")  # not imported here: a test may want to load torch first
    return current and current.current_agent()


def end_agent() -> None:
    """End this process as a worker, without waiting for others."""
    from telegrad import rpc

    rpc.shutdown(graceful=False)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it stays in sight."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants(root: int) -> list[tuple[int, str]]:
    multiprocessing.active_children()  # collects those that have ended
    if not Path("/proc/self/stat").exists():
        return [(child.pid, "") for child in multiprocessing.active_children() if child.pid is not None]
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (stat := _read(f"{entry.path}/stat")):
            # The command, in brackets, may itself hold brackets and spaces; the fields are counted from behind it.
            state, parent, *rest = stat.rpartition(")")[2].split()
            if state not in "ZX":  # ended, not yet waited for
                children.setdefault(int(parent), []).append((int(entry.name), rest[17]))
    found = [child for child in children.get(root, ()) if not any(name in _command(child[0]) for name in _LASTING)]
    # A lasting helper is left out, what it started for us is not: a fork server's children are a test's workers.
    queue = list(children.get(root, ()))
    while queue:
        below = children.get(queue.pop()[0], ())
        found += below
        queue += below
    return [child for child in found if _OF_A_BROWSER not in _command(child[0])]


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # it ended while we looked, or belongs to somebody else
