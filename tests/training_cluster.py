"""Real worker processes for tests of training: the test itself is worker `trainer`, the others only serve.

Layers are made from a seed, on whichever worker they live, so the same model can be made again in one process and serve
as the oracle.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import nn

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from tests.cluster import process

OWNERS = ("ps0", "ps1", "ps2")
WIDTHS = (6, 8, 8, 3)
_starts = itertools.count()


def start(directory: Path, others: Sequence[str] = OWNERS) -> list[BaseProcess]:
    """Start `others` and join them as `trainer`; returns their processes."""
    meeting = directory / f"meeting{next(_starts)}"
    world = 1 + len(others)
    processes = [process(serve, name, rank, world, str(meeting)) for rank, name in enumerate(others, start=1)]
    join_job("trainer", 0, world, str(meeting))
    return processes


@contextmanager
def cluster(directory: Path, others: Sequence[str] = OWNERS) -> Iterator[list[BaseProcess]]:
    """The same for the length of a block; at its end all workers have shut down together."""
    processes = start(directory, others)
    try:
        yield processes
        rpc.shutdown()
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    finally:
        end(processes)


def end(processes: Sequence[BaseProcess], patience: float = 60.0) -> None:
    """Wait for processes that are ending. Torch takes its time to leave a busy machine; what takes longer is stuck."""
    stuck = []
    for each in processes:
        each.join(patience)
        if each.is_alive():
            stuck.append(each.name)
            each.kill()
            each.join()
    assert not stuck, f"{stuck} did not end by themselves"


def serve(name: str, rank: int, world: int, meeting: str) -> None:
    """A worker that does what others ask until all shut down."""
    torch.set_num_threads(1)
    join_job(name, rank, world, meeting)
    rpc.shutdown()


def join_job(name: str, rank: int, world: int, meeting: str) -> None:
    """Become worker `name` of the job that meets at the file `meeting`."""
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def layer(seed: int, inputs: int, outputs: int) -> nn.Module:
    """A layer whose weights depend on the seed only."""
    made = nn.Linear(inputs, outputs)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=numbers) * 0.5)
    return made


class Stack(nn.Module):
    """Layers with a tanh between them: remote ones, one per owner, or local ones."""

    def __init__(self, owners: Sequence[str | None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for seed, (owner, shape) in enumerate(zip(owners, itertools.pairwise(WIDTHS), strict=True)):
            arguments = (seed, *shape)
            self.layers.append(layer(*arguments) if owner is None else RemoteModule(owner, layer, arguments))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            x = torch.tanh(each(x))
        return x


def split_model() -> Stack:
    """The model with one layer on each owner."""
    return Stack(OWNERS)


def local_model() -> Stack:
    """The same model in this process."""
    return Stack([None] * len(OWNERS))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of one step."""
    numbers = torch.Generator().manual_seed(1000 + number)
    return torch.randn(5, WIDTHS[0], generator=numbers), torch.randn(5, WIDTHS[-1], generator=numbers)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """The model's loss on one batch."""
    inputs, targets = batch(number)
    return nn.functional.mse_loss(model(inputs), targets)


class Weights:
    """A parameter server's parameters, for trainers that push gradients of their own."""

    def __init__(self, size: int) -> None:
        self.first = nn.Parameter(torch.zeros(size))
        self.second = nn.Parameter(torch.zeros(size))
        self.lock = threading.Lock()

    def references(self) -> list[object]:
        """References to both parameters."""
        return [rpc.RRef(self.first), rpc.RRef(self.second)]

    def dot(self, x: torch.Tensor) -> torch.Tensor:
        """A loss whose gradient is `x`, for both parameters alike."""
        return (self.first * x).sum() + (self.second * x).sum()

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parameters as they are now."""
        return self.first.detach().clone(), self.second.detach().clone()

    def stray_gradients(self) -> int:
        """How many parameters have a `.grad`."""
        return sum(param.grad is not None for param in (self.first, self.second))


def push(weights: object, optimizer: object, x: torch.Tensor) -> None:
    """One whole step of a trainer against a parameter server."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [weights.rpc_sync().dot(x)])
        optimizer.step(context_id)
