"""What a recording costs: an empty call and a training step of about 10 ms, with recording off and on in turns.

    python -m benchmarks.recording                 times, in rounds that alternate; the best round of each counts
    python -m benchmarks.recording --bytecodes     bytecodes of an empty call on both workers, all threads: no noise

The collecting is part of it: the worker that records asks the other for its events twice a second, as `record` does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.observe.service import observation_of
from telegrad.observe.timeline.recording import Recording
from telegrad.rpc.current import require_agent

ROUNDS = 7
CALLS, STEPS = 3000, 40
_WIDTH = 512

weight = torch.ones(_WIDTH, _WIDTH, requires_grad=True)
_work = 1


def nothing() -> None:
    """An empty call."""


def forward(x: torch.Tensor, work: int) -> torch.Tensor:
    for _ in range(work):
        x = torch.tanh(x @ weight / _WIDTH)
    return x


def calls() -> None:
    for _ in range(CALLS):
        rpc.rpc_sync("worker1", nothing)


def steps() -> None:
    for _ in range(STEPS):
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", forward, args=(torch.ones(64, _WIDTH), _work))
            autograd.backward(context_id, [y.sum()])


def timed(run: Callable[[], None], count: int) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) / count


def recorded(run: Callable[[], None], count: int) -> float:
    """The same while a recording is on; its beginning and end do not count."""
    recording = Recording(require_agent())
    recording.start()
    try:
        return timed(run, count)
    finally:
        recording.stop()


def compare(what: str, run: Callable[[], None], count: int, unit: float, name: str) -> None:
    timed(run, count)
    off, on = [], []
    for _ in range(ROUNDS):
        off.append(timed(run, count) * unit)
        on.append(recorded(run, count) * unit)
    best, middle = min(on) / min(off) - 1, statistics.median(on) / statistics.median(off) - 1
    print(
        f"{what:<22} off {min(off):7.1f} {name}   on {min(on):7.1f} {name}   {best:+.1%} (best), {middle:+.1%} (median)"
    )


def choose_work() -> None:
    """As many layers as make a step of 10 ms here."""
    global _work  # noqa: PLW0603 - one number for the whole program
    while timed(steps, STEPS) < 0.010 and _work < 4096:
        _work *= 2


def times() -> None:
    with telegrad.local_cluster(workers=2):
        compare("an empty call", calls, CALLS, 1e6, "us")
        choose_work()
        compare("a training step", steps, STEPS, 1e3, "ms")


# --- bytecodes ---


def bytecodes() -> dict[str, tuple[float, float]]:
    """Bytecodes of an empty call, on the caller and on its peer, with recording off and on."""
    from benchmarks.bytecodes import count_calls

    found = {}
    for name, before in (("off", None), ("on", start_here)):
        with tempfile.TemporaryDirectory() as folder:
            caller, peer = count_calls(Path(folder), nothing, before)
            found[name] = (_of_calls(caller), _of_calls(peer))
    return found


def _of_calls(count: dict[str, float]) -> float:
    """All but what is done by the clock: events are taken out twice a second, however many calls there were."""
    by_the_clock = ("observe/", "trace.py:Recorder.drain")
    return sum(number for name, number in count.items() if not name.startswith(by_the_clock))


def start_here() -> None:
    """Record in this process; whoever calls it collects nothing."""
    observation_of(require_agent()).watch("benchmark")


def main() -> None:
    if "--bytecodes" in sys.argv:
        for name, (caller, peer) in bytecodes().items():
            print(f"an empty call, recording {name:<4} caller {caller:6.0f}   peer {peer:6.0f} bytecodes")
    else:
        times()


if __name__ == "__main__":
    main()
