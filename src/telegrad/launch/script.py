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
from collections.abc import Mapping, Sequence
from types import FrameType

from telegrad.launch.processes import Supervised, describe_status, end, say
from telegrad.rpc.threads.cores import variables_for

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 5.0  # seconds that workers have to end after a signal or after one of them failed
_LOOPBACK = "127.0.0.1"


def run_script(workers: int, command: Sequence[str], *, name_prefix: str = "worker", seed: int | None = None) -> int:
    """Run `python command...` on each of `workers` local workers; the exit status of the first that fails, or 0."""
    ended: queue.SimpleQueue[Supervised | None] = queue.SimpleQueue()
    with socket.create_server((_LOOPBACK, 0), backlog=max(128, 4 * workers)) as listener:
        shared = _shared_variables(workers, listener.getsockname()[1])
        if seed is not None:
            shared["TELEGRAD_SEED"] = str(seed)
        processes: list[Supervised] = []
        received: list[int] = []

        def forward(number: int, _: FrameType | None) -> None:
            for process in processes:
                process.signal(number)
            if number in _ENDING:
                received.append(number)
                ended.put(None)

        previous = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            for rank in range(workers):
                mine = _own_variables(rank, f"{name_prefix}{rank}")
                python = [sys.executable, "-u", *command]
                processes.append(Supervised(f"{name_prefix}{rank}", python, {**shared, **mine}, on_end=ended.put))
            _store = _open_store(listener)  # kept until all have ended
            status = _await_end(processes, ended)
        finally:
            end(processes, grace=_GRACE if received else 0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)
    return 128 + received[0] if received else status


def _await_end(processes: Sequence[Supervised], ended: "queue.SimpleQueue[Supervised | None]") -> int:
    """Wait until all have ended well, one has not, or a signal asks to end."""
    for _ in processes:
        process = ended.get()
        if process is None:
            return 0
        if process.status:
            say("telegrad run", f"{process.name} {describe_status(process.status)}; ending the others", "stderr")
            return process.status if process.status > 0 else 128 - process.status
    return 0


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
