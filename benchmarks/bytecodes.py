"""How many bytecodes a call and an autograd step with 2x2 tensors execute, by layer, on the worker that runs it and on
its peer.

    python -m benchmarks.bytecodes                          all cases, by layer
    python -m benchmarks.bytecodes --functions [case ...]   by function

A measure of the work that is left in Python, without noise: the same step gives the same count on any machine and under
any load. All threads are counted, waiting is not, and neither is what happens by the clock.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

STEPS = 40
_WARM_UP = 30
_DEADLINE = 150.0
_LOOK = 0.5  # seconds: a thread that looks for its next message finds it, as it does where steps follow one another
_BY_THE_CLOCK = "threads/timer.py"  # used every few milliseconds, and so less often than once a step
_TIMER = "-timer"  # the thread that wakes by the clock: how often depends on the machine

CASES = {
    "empty": "empty call",
    "tensors": "call with two 2x2",
    "step": "2x2 step",
    "server": "server step, 2x2",
}

Count = dict[str, float]  # bytecodes for each step, by function
Both = tuple[Count, Count]  # of the worker that runs it, and of its peer


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

    def take(self, steps: int) -> Count:
        """What was counted since the last time."""
        total: Counter[str] = Counter()
        found, self.found = self.found, Counter()
        for code, count in found.items():
            where = code.co_filename.rpartition("telegrad/")[2]
            total[f"{where}:{code.co_qualname}"] += count
        return {name: count / steps for name, count in total.items()}


_counter = _Counter()


def _steps() -> dict[str, Callable[[], None]]:
    """What is counted."""
    import torch

    from telegrad import autograd, rpc

    x, plain, ones = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2), torch.ones(4)

    def empty() -> None:
        rpc.rpc_sync("worker1", _nothing)

    def tensors() -> None:
        rpc.rpc_sync("worker1", torch.add, args=(plain, plain.clone()))

    def step() -> None:
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", torch.add, args=(x, 1.0))
            autograd.backward(context_id, [torch.dot(y.view(-1), ones)])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones(2, 2))

    return {"empty": empty, "tensors": tensors, "step": step, "server": _Trainer().step}


class _Trainer:
    """What a trainer of a parameter server does: fetch, backward, step."""

    def __init__(self) -> None:
        import torch

        from telegrad import optim, rpc

        self._weight = rpc.remote("worker1", torch.ones, args=(2, 2), kwargs={"requires_grad": True})
        self._optimizer = optim.DistributedOptimizer(torch.optim.SGD, [self._weight], lr=1e-6)
        self._batch = torch.ones(1, 2)

    def step(self) -> None:
        from telegrad import autograd, rpc

        with autograd.context() as context_id:
            weight = rpc.rpc_sync("worker1", _read, args=(self._weight,))
            autograd.backward(context_id, [(self._batch @ weight).sum()])
            self._optimizer.step(context_id)


def _read(weight: Any) -> Any:
    value = weight.local_value()
    return value.view_as(value)


def _join(rank: int, meeting: str, workers: int = 2) -> None:
    _counter.install()
    from telegrad import rpc
    from telegrad.engine import cleanup
    from telegrad.rpc.server import stuck_threads
    from telegrad.rpc.threads import spin

    cleanup._SECONDS = _DEADLINE  # so that as many contexts as may be are told of together, however long one takes here
    spin.Spinner.wait = lambda self, ready, *_: ready(_LOOK)
    stuck_threads._LOOK_SECONDS = 10 * _LOOK  # a request that is counted takes so long that it would count as stuck
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=rpc.RpcBackendOptions(init_method=meeting)
    )


def _count(case: str, step: Callable[[], object], answers: Any) -> None:
    from telegrad import rpc

    for _ in range(_WARM_UP):
        step()
    rpc.rpc_sync("worker1", _switch, args=(True,))
    _switch(True)
    for _ in range(STEPS):
        step()
    here = _switch(False)
    answers.put((case, here, rpc.rpc_sync("worker1", _switch, args=(False,))))


def _worker(rank: int, meeting: str, cases: tuple[str, ...], answers: Any) -> None:
    _join(rank, meeting)
    from telegrad import rpc

    if rank == 0:
        steps = _steps()
        for case in cases:
            _count(case, steps[case], answers)
    rpc.shutdown()


def _calling(rank: int, meeting: str, function: Any, before: Any, answers: Any) -> None:
    """The same for plain calls of `function`, after `before` has run on both workers."""
    _join(rank, meeting)
    from telegrad import rpc

    if before is not None:
        before()
    if rank == 0:
        _count("calls", lambda: rpc.rpc_sync("worker1", function), answers)
    rpc.shutdown()


def _root_of_many(rank: int, meeting: str, workers: int, answers: Any) -> None:
    """A pass over all other workers, counted on the root: the pass alone, without the calls."""
    _join(rank, meeting, workers)
    import torch

    from telegrad import autograd, rpc

    x = torch.ones(2, 2, requires_grad=True)

    def step(counted: bool) -> None:
        with autograd.context() as context_id:
            futures = [rpc.rpc_async(f"worker{n}", torch.mul, args=(x, 2.0)) for n in range(1, workers)]
            loss = torch.stack([future.wait() for future in futures]).sum()
            _counter.on = counted
            autograd.backward(context_id, [loss])
            _counter.on = False

    if rank == 0:
        for number in range(_WARM_UP + STEPS):
            step(number >= _WARM_UP)
        answers.put(("pass", _counter.take(STEPS), {}))
    rpc.shutdown()


def per_participant(few: int = 3, many: int = 7) -> Count:
    """Bytecodes that one more participant costs the root of a pass."""
    counts = []
    for workers in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            counts.append(_both(_root_of_many, Path(folder), 1, workers, workers=workers)["pass"][0])
    less, more = counts
    return {name: (number - less.get(name, 0)) / (many - few) for name, number in more.items()}


def _nothing() -> None:
    pass


def _switch(on: bool) -> Count:
    _counter.on = on
    return _counter.take(STEPS)


def measure(*cases: str) -> dict[str, Both]:
    """Bytecodes of each function for one step of each of these cases."""
    with tempfile.TemporaryDirectory() as folder:
        return _both(_worker, Path(folder), len(cases), cases)


def count_calls(folder: Path, function: Any, before: Any = None) -> Both:
    """The same for one call of `function`, on the caller and on its peer."""
    return _both(_calling, folder, 1, function, before)["calls"]


def _both(target: Any, folder: Path, answered: int, *more: Any, workers: int = 2) -> dict[str, Both]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    meeting = Path(folder, "meeting").as_uri()
    arguments = [(rank, meeting, *more, answers) for rank in range(workers)]
    started = [context.Process(target=target, args=given, daemon=True) for given in arguments]
    for worker in started:
        worker.start()
    try:
        found = [answers.get(timeout=_DEADLINE) for _ in range(answered)]
        for worker in started:
            worker.join(_DEADLINE)
    finally:
        for worker in started:
            worker.kill()
            worker.join()
    return {case: (root, peer) for case, root, peer in found}


def by_layer(count: Count) -> Count:
    """The same by folder of `src/telegrad`."""
    layers: Counter[str] = Counter()
    for name, number in count.items():
        layers[name.partition(":")[0].partition("/")[0]] += number  # a Counter of floats
    return dict(layers.most_common())


def report() -> str:
    """A table: layers, then totals."""
    lines = []
    for case, both in measure(*CASES).items():
        root, peer = (by_layer(count) for count in both)
        lines.append(f"{'bytecodes: ' + CASES[case]:<34}{'root':>8}{'peer':>8}")
        lines += [f"  {layer:<32}{root.get(layer, 0):8.0f}{peer.get(layer, 0):8.0f}" for layer in {**root, **peer}]
        lines.append(f"  {'total':<32}{sum(root.values()):8.0f}{sum(peer.values()):8.0f}")
    return "\n".join(lines)


def main() -> None:
    if "--participant" in sys.argv:
        count = per_participant()
        print(f"one more participant of a pass costs its root {sum(count.values()):.0f} bytecodes")
        for function, number in sorted(count.items(), key=lambda item: -item[1])[:40]:
            print(f"  {number:8.1f}  {function}")
        return
    if "--functions" not in sys.argv:
        print(report())
        return
    for case, both in measure(*[case for case in CASES if case in sys.argv] or CASES).items():
        for name, count in zip(("root", "peer"), both, strict=True):
            print(f"{CASES[case]}, {name}: {sum(count.values()):.0f}")
            for function, number in sorted(count.items(), key=lambda item: -item[1]):
                print(f"  {number:8.1f}  {function}")


if __name__ == "__main__":
    main()
    os._exit(0)
