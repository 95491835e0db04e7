"""CUDA tensors between two workers on one GPU: `python -m benchmarks --cases cuda`, skipped where there is no GPU.

Each implementation runs in two fresh processes, three times, in turns; a figure is the median of its best run: on which
cores the processes come to lie makes up to a third of a step. A step ends when the GPU has done what it asked for. A
call on the host stands beside them for what the call itself costs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MB = 2**20
_SECONDS = 1.5  # for each case
_MOST_STEPS = 400
_REPEATS = 3
BLOCKS = "telegrad_blocks"  # without the option `cuda_direct`


class Case(NamedTuple):
    """One line of the table; `bar` and `aim` are times torch's speed."""

    key: str
    title: str
    prepare: Callable[[Any], Callable[[], object]]
    over_tcp: bool = False
    bar: float | None = None
    aim: float | None = None


# --- what the peer runs ---


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def echo(x: Tensor) -> Tensor:
    return x


_model: list[torch.nn.Module] = []


def forward(x: Tensor) -> Tensor:
    """Two layers that live on the peer's GPU."""
    if not _model:
        torch.manual_seed(0)
        _model.append(torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000)).cuda())
    return _model[0](x)


# --- the cases ---


def _adding(device: str) -> Callable[[Any], Callable[[], object]]:
    def prepare(api: Any) -> Callable[[], object]:
        x, y = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)
        return lambda: api.rpc.rpc_sync("w1", add, args=(x, y))

    return prepare


def _echoing(nbytes: int, device: str = "cuda") -> Callable[[Any], Callable[[], object]]:
    def prepare(api: Any) -> Callable[[], object]:
        x = torch.ones(nbytes // 4, device=device)
        return lambda: api.rpc.rpc_sync("w1", echo, args=(x,))

    return prepare


def _training(api: Any) -> Callable[[], object]:
    x = torch.ones(1000, 1000, device="cuda", requires_grad=True)

    def step() -> None:
        with api.autograd.context() as context_id:
            y = api.rpc.rpc_sync("w1", forward, args=(x,))
            api.autograd.backward(context_id, [y.sum()])

    return step


CASES = (
    Case("host_add", "add of two 2x2 on the host", _adding("cpu")),
    Case("add", "add of two 2x2", _adding("cuda"), bar=3, aim=6),
    Case("echo_1", "echo of 1 MB", _echoing(MB), bar=3, aim=5),
    Case("echo_64", "echo of 64 MB", _echoing(64 * MB), bar=4, aim=5),
    Case("echo_1024", "echo of 1 GB", _echoing(1024 * MB), bar=20, aim=40),
    Case("step", "autograd step, two Linear(1000, 1000), batch 1000", _training, bar=2.5, aim=4.9),
    Case("tcp_echo_64", "TCP: echo of 64 MB", _echoing(64 * MB), over_tcp=True, bar=1.5),
    Case("tcp_host_64", "TCP: echo of 64 MB on the host", _echoing(64 * MB, "cpu"), over_tcp=True),
)


# --- running them ---


class _Api(NamedTuple):
    rpc: Any
    autograd: Any
    options: Callable[..., Any]


def _api(name: str, over_tcp: bool) -> _Api:
    if name.startswith("telegrad"):
        from telegrad import autograd, rpc

        ways: dict[str, Any] = {"transports": ("tcp",)} if over_tcp else {"cuda_direct": name != BLOCKS}
        return _Api(rpc, autograd, lambda **given: rpc.RpcBackendOptions(**given, **ways))
    import torch.distributed.autograd as torch_autograd
    from torch.distributed import rpc as torch_rpc

    ways = {"_transports": ["uv"], "_channels": ["basic", "cuda_basic"]} if over_tcp else {}
    return _Api(torch_rpc, torch_autograd, lambda **given: torch_rpc.TensorPipeRpcBackendOptions(**given, **ways))


def _work(name: str, rank: int, folder: str, keys: list[str], over_tcp: bool, results: Any) -> None:
    api = _api(name, over_tcp)
    options = api.options(init_method=f"file://{folder}/meeting", device_maps={f"w{1 - rank}": {0: 0}})
    torch.zeros(1, device="cuda")
    api.rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for case in CASES:
            if case.key in keys and case.over_tcp == over_tcp:
                results.put((case.key, _measure(case.prepare(api))))
    api.rpc.shutdown()


def _measure(step: Callable[[], object]) -> float:
    """The median seconds of a step."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    taken = []
    until = time.perf_counter() + _SECONDS
    while len(taken) < 10 or (time.perf_counter() < until and len(taken) < _MOST_STEPS):
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


@contextlib.contextmanager
def _ended(processes: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(name: str, keys: list[str], over_tcp: bool) -> dict[str, float]:
    wanted = [case.key for case in CASES if case.key in keys and case.over_tcp == over_tcp]
    if not wanted:
        return {}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(name, rank, folder, wanted, over_tcp, results) for rank in range(2)]
        processes = [context.Process(target=_work, args=each) for each in arguments]
        with _ended(processes):
            for process in processes:
                process.start()
            deadline = time.monotonic() + 60 + 10 * len(wanted)
            while len(found) < len(wanted) and time.monotonic() < deadline:
                try:
                    key, seconds = results.get(timeout=1.0)
                    found[key] = seconds
                except Exception:
                    if not any(process.is_alive() for process in processes):
                        break
            for process in processes:
                process.join(20)
    return found


def measure(
    implementations: list[str], keys: list[str] | None = None, repeats: int = _REPEATS
) -> dict[str, dict[str, float]]:
    """By case and implementation, the best of the medians, in seconds."""
    chosen = keys or [case.key for case in CASES]
    best: dict[str, dict[str, float]] = {key: {} for key in chosen}
    for _ in range(repeats):
        for over_tcp in (False, True):
            for name in implementations:
                for key, seconds in _run(name, chosen, over_tcp).items():
                    best[key][name] = min(seconds, best[key].get(name, seconds))
    return best


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def show(best: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, two processes, one GPU")
    print("| case | torch | Telegrad | ratio | blocks alone | ratio | bar | aim |" + "\n|" + " --- |" * 8)
    for case in CASES:
        if case.key in best:
            torchs = best[case.key].get("torch")
            cells = [case.title, _shown(torchs)]
            for ours in (best[case.key].get(name) for name in ("telegrad", BLOCKS)):
                cells += [_shown(ours), f"{torchs / ours:.1f}x" if torchs and ours else "-"]
            cells += [f"{times:g}x" if times else "-" for times in (case.bar, case.aim)]
            print(f"| {' | '.join(cells)} |")


def main(
    implementations: list[str], keys: list[str] | None = None, repeats: int = _REPEATS
) -> dict[str, dict[str, float]]:
    """Measure and print; nothing where there is no GPU."""
    if torch.cuda.device_count() == 0:
        print("cuda: skipped, there is no GPU here", file=sys.stderr)
        return {}
    best = measure(implementations, keys, repeats)
    show(best)
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", type=lambda text: text.split(","), default=["torch", "telegrad", BLOCKS])
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--repeats", type=int, default=_REPEATS)
    parsed = parser.parse_args()
    main(parsed.impl, parsed.only, parsed.repeats)
