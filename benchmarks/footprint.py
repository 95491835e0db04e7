"""What needs a fresh interpreter: the time an import takes, and the memory of an idle worker beyond torch's own import.

`python -m benchmarks.footprint IMPLEMENTATION RANK PORT` is one of the two workers whose memory is read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import apis, work
from benchmarks.cases import Case, no_step
from benchmarks.cluster import free_port
from benchmarks.harness import Line, Measured

DEADLINE = 60.0

IMPORT = Case("import", "import, beyond import torch", no_step, unit="ms", group="also", at_most=0.1)
IDLE_MEMORY = Case("memory", "memory of an idle worker, beyond torch's import", no_step, unit="MB", group="also")

_TIME_IMPORT = """
import importlib, time, torch
begun = time.perf_counter()
for name in {names!r}: importlib.import_module(name)
print(time.perf_counter() - begun)
"""


def run(case: Case, implementations: Sequence[str], rounds: int) -> Line:
    """Measure one of the cases above, in rounds that alternate between the implementations."""
    measure = _import_seconds if case is IMPORT else _idle_megabytes
    line = Line(case, {name: Measured() for name in implementations})
    for _ in range(rounds):
        for name, measured in line.by_implementation.items():
            if not measured.error:
                try:
                    measured.rounds.append([measure(apis.BY_NAME[name])])
                except FootprintError as error:
                    measured.error = str(error)
    return line


class FootprintError(Exception):
    """A fresh interpreter failed or did not end in time; the text is its last line."""


def _import_seconds(api: apis.Api) -> float:
    names = [api.rpc_module.partition(".")[0], api.rpc_module, api.autograd_module]
    return _answers([[sys.executable, "-c", _TIME_IMPORT.format(names=names)]])[0]


def _idle_megabytes(api: apis.Api) -> float:
    """Of worker 1: it has joined and answered one call, and now waits."""
    port = free_port()
    commands = [[sys.executable, "-m", "benchmarks.footprint", api.name, str(rank), str(port)] for rank in (0, 1)]
    return _answers(commands)[0]


def _answers(commands: Sequence[Sequence[str]]) -> list[float]:
    """Run the commands at once; the number each prints last, if it prints one. All are ended, whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    try:
        processes.extend(
            subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for command in commands
        )
        answers = []
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE)
            if process.returncode:
                raise FootprintError((err.strip().splitlines() or ["failed without a word"])[-1])
            answers.append(float(out.split()[-1]) if out.strip() else 0.0)
        return answers
    except subprocess.TimeoutExpired:
        raise FootprintError(f"a fresh interpreter did not end within {DEADLINE:.0f} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _idle_worker(implementation: str, rank: int, port: int) -> None:
    """Worker 0 calls worker 1 once, then asks it what it holds, and prints that; worker 1 only waits."""
    api = apis.BY_NAME[implementation]
    work.remember_memory()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    api.start(rank, 2, apis.DEFAULT)
    if rank == 0:
        api.rpc.rpc_sync(apis.worker_name(1), work.nothing)
        print(api.rpc.rpc_sync(apis.worker_name(1), work.memory_since))
    api.stop()


if __name__ == "__main__":
    _idle_worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
