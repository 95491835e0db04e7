"""A script on several local workers: the variables torchrun would set, a name and a secret for each, one store for all.

The store where the workers meet belongs to this launcher, on a port the system chose and that was never let go of, so
no other program can take it, and it is there until the last worker has ended.
"""

import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from telegrad.launch.processes import Supervised, describe_status, end, say
from telegrad.rpc.threads.cores import variables_for

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 5.0  # seconds that workers have to end after a signal or after one of them failed
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before a worker that failed is started again
_LOOPBACK = "127.0.0.1"


def run_script(
    workers: int,
    command: Sequence[str],
    *,
    name_prefix: str = "worker",
    max_restarts: int = 0,
    seed: int | None = None,
) -> int:
    """Run `python command...` on each of `workers` local workers; the exit status of the first that fails, or 0.

    A worker that fails is started again up to `max_restarts` times, alone, after a pause that doubles each time; the
    others go on, and it joins them again under its name."""
    with socket.create_server((_LOOPBACK, 0), backlog=max(128, 4 * workers)) as listener:
        shared = _shared_variables(workers, listener.getsockname()[1])
        if seed is not None:
            shared["TELEGRAD_SEED"] = str(seed)
        run = _Run(command, shared, max_restarts)
        previous = {number: signal.signal(number, run.forward) for number in _FORWARDED}
        try:
            for rank in range(workers):
                run.start(rank, f"{name_prefix}{rank}")
            run.store = _open_store(listener)  # kept until all have ended
            status = run.await_end()
        finally:
            end(run.processes.values(), grace=_GRACE if run.received else 0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)
    return 128 + run.received[0] if run.received else status


class _Run:
    """The workers of one script, by rank. Started and waited for by the main thread alone; signals come in between."""

    def __init__(self, command: Sequence[str], shared: Mapping[str, str], max_restarts: int) -> None:
        self._command = [sys.executable, "-u", *command]
        self._shared = shared
        self._max_restarts = max_restarts
        self._restarts: dict[int, int] = {}
        self._due: dict[int, float] = {}  # workers to be started again, and when
        self._ended: queue.SimpleQueue[tuple[int, Supervised] | None] = queue.SimpleQueue()
        self.processes: dict[int, Supervised] = {}
        self.received: list[int] = []
        self.store: Any = None

    def start(self, rank: int, name: str) -> None:
        """Start a worker, or start it again."""
        restart = {"TELEGRAD_RESTART": str(self._restarts.get(rank, 0))}
        variables = {**self._shared, **_own_variables(rank, name), **restart}
        self.processes[rank] = Supervised(
            name, self._command, variables, on_end=lambda process: self._ended.put((rank, process))
        )

    def forward(self, number: int, _: FrameType | None) -> None:
        """A signal came: for all of them."""
        for process in list(self.processes.values()):
            process.signal(number)
        if number in _ENDING:
            self.received.append(number)
            self._ended.put(None)

    def await_end(self) -> int:
        """Wait until all have ended well, one has failed for good, or a signal asks to end."""
        running = set(self.processes)
        while running:
            event = self._next_event()
            if event is None:
                if self.received:
                    return 0
                continue
            rank, process = event
            if not process.status:
                running.discard(rank)
                self._note_end(process)
            elif self._restarts.get(rank, 0) < self._max_restarts:
                count = self._restarts[rank] = self._restarts.get(rank, 0) + 1
                pause = min(_FIRST_PAUSE * 2 ** (count - 1), _LONGEST_PAUSE)
                self._due[rank] = time.monotonic() + pause
                what = f"{process.name} {describe_status(process.status)}; restart {count} of {self._max_restarts}"
                say("telegrad run", f"{what} in {pause:g} s", "stderr")
            else:
                again = f" after {self._restarts[rank]} restarts" if rank in self._restarts else ""
                what = f"{process.name} {describe_status(process.status)}{again}; ending the others"
                say("telegrad run", what, "stderr")
                return process.status if process.status > 0 else 128 - process.status
        return 0

    def _next_event(self) -> "tuple[int, Supervised] | None":
        """The next end of a worker; None if a signal came or a worker was started again instead."""
        due = min(self._due.values(), default=None)
        try:
            return self._ended.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except queue.Empty:
            for rank in [rank for rank, when in self._due.items() if when <= time.monotonic()]:
                del self._due[rank]
                self.start(rank, self.processes[rank].name)
            return None

    def _note_end(self, process: Supervised) -> None:
        """Say so if a worker ended well and yet left the others without a word."""
        from telegrad.rpc.job.rendezvous.member_log import read_records  # noqa: PLC0415 - torch is slow to import
        from telegrad.rpc.job.rendezvous.store_client import Prefixed  # noqa: PLC0415
        from telegrad.rpc.trust.seal import Seal  # noqa: PLC0415

        seal, where = Seal(self._shared["TELEGRAD_SECRET"].encode()), f"telegrad/attempt 0 of {len(self.processes)}"
        records = [
            m for kind in ("static", "open") for m in read_records(Prefixed(f"{where}/{kind}", self.store), seal)
        ]
        if any(member.ending and member.name == process.name for member in records):
            what = f"{process.name} exited normally without calling rpc.shutdown(); the others have lost what it held"
            say("telegrad run", what, "stderr")


def _shared_variables(workers: int, port: int) -> dict[str, str]:
    ours = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TELEGRAD_SECRET": secrets.token_hex(32),
        # torch's own words for: the launcher has the store, and rank 0 connects to it like the others.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return {**os.environ, **variables_for(workers, os.environ), **ours}


def _own_variables(rank: int, name: str) -> Mapping[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "TELEGRAD_NAME": name}


def _open_store(listener: socket.socket) -> object:
    # Imported while the workers start: they wait in the listener's queue meanwhile.
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

    listener.setblocking(False)  # the store accepts until nobody waits, and serves only then
    host, port = listener.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))
