"""What runs on the other workers: plain functions, sent by reference.

They are the same for every implementation; those that call on ask `apis.here()` whose worker they are in.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks import apis


def nothing() -> None:
    """The empty call: what is left is the cost of calling."""


def echo(value: Any) -> Any:
    return value


def take(value: Any) -> None:
    """Something large came; that is all."""


def add(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return a + b


class Counter:
    """Lives on one worker, and is named from another."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


def count(counter: Any, number: int) -> int:
    """A method of a remote object, called the way programs do: with the reference as an argument."""
    total: int = counter.local_value().add(number)
    return total


def through(x: torch.Tensor, rest: tuple[str, ...]) -> torch.Tensor:
    """One link of a chain: multiply by a parameter of this worker, then let the rest of the chain go on."""
    y = x * _weight()
    if not rest:
        return y
    result: torch.Tensor = apis.here().rpc.rpc_sync(rest[0], through, args=(y, rest[1:]))
    return result


_weights: dict[str, torch.nn.Parameter] = {}


def _weight() -> torch.nn.Parameter:
    return _weights.setdefault("chain", torch.nn.Parameter(torch.ones(2, 2)))


def shared_parameter(rows: int, columns: int) -> torch.nn.Parameter:
    """The parameter server's parameters, made at the first request and kept."""
    return _weights.setdefault("server", torch.nn.Parameter(torch.ones(rows, columns)))


def read(parameter: Any) -> torch.Tensor:
    """Runs on the owner of `parameter`, a reference. A view, because torch loses the gradient of a bare parameter."""
    value: torch.Tensor = parameter.local_value()
    return value.view_as(value)


class Trainer:
    """One trainer of the parameter server: it lives on its worker and runs as many steps as it is asked for."""

    def __init__(self, server: str, rows: int, columns: int) -> None:
        api = apis.here()
        self.server = server
        self.parameter = api.rpc.remote(server, shared_parameter, args=(rows, columns))
        self.optimizer = api.DistributedOptimizer(torch.optim.SGD, [self.parameter], lr=1e-6)
        self.batch = torch.ones(1, rows)

    def steps(self, count: int) -> None:
        api = apis.here()
        for _ in range(count):
            with api.dist_autograd.context() as context_id:
                weight = api.rpc.rpc_sync(self.server, read, args=(self.parameter,))
                loss = (self.batch @ weight).sum()
                api.dist_autograd.backward(context_id, [loss])
                self.optimizer.step(context_id)


_trainers: dict[str, Trainer] = {}


def train(server: str, rows: int, columns: int, count: int) -> None:
    """Runs on a trainer: `count` steps, the trainer itself made at the first call."""
    if server not in _trainers:
        _trainers[server] = Trainer(server, rows, columns)
    _trainers[server].steps(count)


_memory_before: list[float] = []


def remember_memory() -> None:
    """Before joining a job: what this process holds with torch imported."""
    _memory_before[:] = [_resident_megabytes()]


def memory_since() -> float:
    """Megabytes this worker holds beyond what it held before it joined."""
    return _resident_megabytes() - _memory_before[0]


def _resident_megabytes() -> float:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024


_cell_weight = torch.full((2, 2), 0.9, requires_grad=True)


def cell(hidden: torch.Tensor) -> torch.Tensor:
    """A recurrent cell with a weight of this worker's own."""
    return torch.tanh(hidden * _cell_weight)
