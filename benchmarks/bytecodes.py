"""How many bytecodes one autograd step with 2x2 tensors executes, by layer, on the worker that runs it and on its peer.

A measure of the work that is left in Python, without noise: the same step gives the same count on any machine and under
any load. All threads are counted, waiting is not.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

STEPS = 40
_WARM_UP = 30
_DEADLINE = 50.0
_LOOK = 0.5  # seconds: a thread that looks for its next message finds it, as it does where steps follow one another
_BY_THE_CLOCK = "threads/timer.py"  # used every few milliseconds, and so less often than once a step
_TIMER = "-timer"  # the thread that wakes by the clock: how often depends on the machine

Count = dict[str, float]  # bytecodes for each step, by function


class _Counter:
    """Counts in every thread that starts after `install`."""

    def __init__(self) -> None:
        self.on = False
        self.found: Counter[CodeType] = Counter()

    def install(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code.co_filename
        if "telegrad" not in code or code.endswith(_BY_THE_CLOCK) or threading.current_thread().name.endswith(_TIMER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.on and event == "opcode":
            self.found[frame.f_code] += 1
        return self._step

    def per_step(self, steps: int) -> Count:
        total: Counter[str] = Counter()
        for code, count in self.found.items():
            where = code.co_filename.rpartition("telegrad/")[2]
            total[f"{where}:{code.co_qualname}"] += count
        return {name: count / steps for name, count in total.items()}


_counter = _Counter()


def _worker(rank: int, meeting: str, answers: Any) -> None:
    _counter.install()
    import torch

    from telegrad import autograd, rpc
    from telegrad.rpc.threads import spin

    spin.Spinner.wait = lambda self, ready, *_: ready(_LOOK)
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=meeting)
    )
    if rank == 0:
        x, ones = torch.ones(2, 2, requires_grad=True), torch.ones(4)

        def step() -> None:
            with autograd.context() as context_id:
                y = rpc.rpc_sync("worker1", torch.add, args=(x, 1.0))
                autograd.backward(context_id, [torch.dot(y.view(-1), ones)])
                assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones(2, 2))

        for _ in range(_WARM_UP):
            step()
        rpc.rpc_sync("worker1", _switch, args=(True,))
        _switch(True)
        for _ in range(STEPS):
            step()
        _switch(False)
        answers.put((0, _counter.per_step(STEPS)))
        rpc.rpc_sync("worker1", _switch, args=(False,))
    rpc.shutdown()
    if rank == 1:
        answers.put((1, _counter.per_step(STEPS)))


def _switch(on: bool) -> None:
    _counter.on = on


def _calling(rank: int, meeting: str, answers: Any, function: Any, before: Any) -> None:
    """The same for plain calls of `function`, after `before` has run on both workers."""
    _counter.install()
    from telegrad import rpc
    from telegrad.rpc.threads import spin

    spin.Spinner.wait = lambda self, ready, *_: ready(_LOOK)
    options = rpc.RpcBackendOptions(init_method=meeting)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if before is not None:
        before()
    if rank == 0:
        for _ in range(_WARM_UP):
            rpc.rpc_sync("worker1", function)
        rpc.rpc_sync("worker1", _switch, args=(True,))
        _switch(True)
        for _ in range(STEPS):
            rpc.rpc_sync("worker1", function)
        _switch(False)
        answers.put((0, _counter.per_step(STEPS)))
        rpc.rpc_sync("worker1", _switch, args=(False,))
    rpc.shutdown()
    if rank == 1:
        answers.put((1, _counter.per_step(STEPS)))


def measure() -> tuple[Count, Count]:
    """Bytecodes of each function for one step, on the root and on its peer."""
    with tempfile.TemporaryDirectory() as folder:
        return _both(_worker, Path(folder))


def count_calls(folder: Path, function: Any, before: Any = None) -> tuple[Count, Count]:
    """The same for one call of `function`, on the caller and on its peer."""
    return _both(_calling, folder, function, before)


def _both(target: Any, folder: Path, *more: Any) -> tuple[Count, Count]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    meeting = Path(folder, "meeting").as_uri()
    workers = [context.Process(target=target, args=(rank, meeting, answers, *more), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        found = dict([answers.get(timeout=_DEADLINE) for _ in workers])
        for worker in workers:
            worker.join(_DEADLINE)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return found[0], found[1]


def by_layer(count: Count) -> Count:
    """The same by folder of `src/telegrad`."""
    layers: Counter[str] = Counter()
    for name, number in count.items():
        layers[name.partition(":")[0].partition("/")[0]] += number  # a Counter of floats
    return dict(layers.most_common())


def report() -> str:
    """A table: layers, then totals."""
    root, peer = (by_layer(count) for count in measure())
    lines = [f"{'bytecodes of a 2x2 step':<24}{'root':>8}{'peer':>8}"]
    lines += [f"{layer:<24}{root.get(layer, 0):8.0f}{peer.get(layer, 0):8.0f}" for layer in {**root, **peer}]
    return "\n".join([*lines, f"{'total':<24}{sum(root.values()):8.0f}{sum(peer.values()):8.0f}"])


def main() -> None:
    if "--functions" in sys.argv:
        for name, count in zip(("root", "peer"), measure(), strict=True):
            print(f"{name} {sum(count.values()):.0f}")
            for function, number in sorted(count.items(), key=lambda item: -item[1]):
                print(f"  {number:8.1f}  {function}")
    else:
        print(report())


if __name__ == "__main__":
    main()
    os._exit(0)
