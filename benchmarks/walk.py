"""How far a reader walks: the files of Telegrad that one call, or one backward pass, goes through on each worker.

    python -m benchmarks.walk            files and changes of file, for each walk
    python -m benchmarks.walk --show     and the walk itself, file by file

A change of file is a call, or a return, that leads from one file of Telegrad into another. The tracer follows every
thread that takes part. Waiting itself (`threads/spin.py`) is left out, and so is what the timer does meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import telegrad
from telegrad import autograd, rpc

ROOT = os.path.dirname(telegrad.__file__) + os.sep
BESIDE = "/spin.py"
WALKS = ("call", "backward")


class Tracer:
    """Notes the files of Telegrad that threads of this process pass, in order, thread by thread."""

    def __init__(self) -> None:
        self.on = False
        self.steps: list[tuple[int, str]] = []

    def install(self) -> None:
        """For this thread and those that start later."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event in ("call", "return") and not threading.current_thread().name.endswith("-timer"):
            where: FrameType | None = frame if event == "call" else frame.f_back
            if where is None:
                return
            file = where.f_code.co_filename
            if file.startswith(ROOT) and not file.endswith(BESIDE):
                self.steps.append((threading.get_ident(), file[len(ROOT) :]))

    def walk(self) -> list[str]:
        """What was noted: for each thread the files in order, each once until it changes."""
        found: list[str] = []
        for thread in dict.fromkeys(thread for thread, _ in self.steps):
            last = ""
            for who, file in self.steps:
                if who == thread and file != last:
                    found.append(file)
                    last = file
        return found


tracer = Tracer()


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What is called."""
    return x + y


def begin() -> None:
    """Note what passes from here on."""
    tracer.steps.clear()
    tracer.on = True


def end() -> list[str]:
    """What has passed; the call of this function is cut off."""
    tracer.on = False
    return tracer.walk()


def one(name: str) -> tuple[list[str], list[str]]:
    """One walk: the files of the caller, and those of the server."""
    x, y = torch.ones(2, 2, requires_grad=name == "backward"), torch.ones(2, 2)

    def measure(action: Callable[[], Any]) -> tuple[list[str], list[str]]:
        rpc.rpc_sync("worker1", begin)
        begin()
        action()
        mine = end()
        return mine, rpc.rpc_sync("worker1", end)

    if name == "call":
        return measure(lambda: rpc.rpc_sync("worker1", add, args=(x, y)))
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", add, args=(x, y)).sum()
        return measure(lambda: autograd.backward(context_id, [loss]))


def serve(rank: int, meeting: str, show: bool) -> None:
    """One of the two workers."""
    tracer.install()
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for name in WALKS:
            walks = [one(name) for _ in range(20)]  # the first ones make connections and name functions
            for who, walk in zip(("caller", "server"), min(walks[10:], key=lambda w: sum(map(len, w))), strict=True):
                print(f"{name:10} {who}: {len(set(walk)):3} files, {len(walk) - 1:3} changes of file")
                if show:
                    print("    " + " > ".join(walk))
    rpc.shutdown()


def main() -> None:
    """Start two workers, and let the first walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the walks themselves")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank >= 0:
        serve(given.rank, given.meeting, given.show)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.walk", "--meeting", os.path.join(folder, "meeting")]
        command += ["--show"] * given.show
        workers = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(2)]
        try:
            for worker in workers:
                worker.wait(60)
        finally:
            for worker in workers:
                worker.kill()


if __name__ == "__main__":
    main()
