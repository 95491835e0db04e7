"""Several trainers on one module: each context keeps the parameters it found, and steps go to the module's own."""

import contextvars
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.nn import SharedModule
from telegrad.optim import DistributedOptimizer
from tests.cluster import Cluster, cluster

TRAINERS = 3
ROUNDS = 4
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.02}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
}

held: dict[str, nn.Module] = {}  # on the server


@pytest.fixture(scope="module")
def job() -> Iterator[Cluster]:
    with cluster(4) as made:
        yield made


def make_model() -> nn.Module:
    torch.manual_seed(5)
    # The batch norm comes first: behind it every gradient would be near zero, and Adam makes steps of rounding errors.
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def hold(shared: bool) -> list[Any]:
    model = make_model()
    held["model"] = SharedModule(model) if shared else model
    return [rpc.RRef(param) for param in model.parameters()]


def forward(x: Tensor) -> Tensor:
    result: Tensor = held["model"](x)
    return result


def state() -> dict[str, Tensor]:
    model: Any = held["model"]
    return dict(getattr(model, "module", model).state_dict())


def batch(trainer: int, number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * trainer + number))


def loss_of(run: Callable[[Tensor], Tensor], trainer: int, number: int) -> Tensor:
    return (run(batch(trainer, number)) - trainer).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process_that_keeps_copies(job: Cluster, name: str) -> None:
    """All trainers go forward, then each goes back and steps: every gradient is of the parameters before all steps."""
    kind, options = OPTIMIZERS[name]
    params = rpc.rpc_sync("worker1", hold, (True,))
    optimizers = [DistributedOptimizer(kind, params, **options) for _ in range(TRAINERS)]
    barrier = threading.Barrier(TRAINERS)
    turns = [threading.Event() for _ in range(TRAINERS * ROUNDS + 1)]
    turns[0].set()

    def train(trainer: int) -> None:
        for number in range(ROUNDS):
            barrier.wait(120)
            with autograd.context() as context_id:
                # Forwards one after the other: the running statistics of a batch norm depend on their order.
                turn = number * TRAINERS + trainer
                assert turns[turn].wait(120)
                loss = loss_of(lambda x: rpc.rpc_sync("worker1", forward, (x,)), trainer, number)
                turns[turn + 1].set()
                barrier.wait(120)
                for each in range(TRAINERS):
                    if each == trainer:
                        autograd.backward(context_id, [loss])
                        optimizers[trainer].step(context_id)
                    barrier.wait(120)

    in_threads(train)
    expected = one_process(kind, options)
    for key, value in rpc.rpc_sync("worker1", state).items():
        assert torch.allclose(value, expected[key], atol=1e-6), key


def one_process(kind: Any, options: dict[str, float]) -> dict[str, Tensor]:
    model = make_model()
    optimizers = [kind(model.parameters(), **options) for _ in range(TRAINERS)]
    for number in range(ROUNDS):
        found = []
        for trainer in range(TRAINERS):
            twin = copy.deepcopy(model)
            loss_of(twin, trainer, number).backward()
            found.append([param.grad for param in twin.parameters()])
            for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
                ours.copy_(theirs)
        for optimizer, gradients in zip(optimizers, found, strict=True):
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param.grad = gradient
            optimizer.step()
    return dict(model.state_dict())


def in_threads(run: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=contextvars.Context().run, args=(guarded, number), daemon=True)
        for number in range(TRAINERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert not errors, errors


def train_freely(params: list[Any], trainer: int, steps: int) -> float:
    """What a trainer on another worker runs."""
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.02)
    loss = torch.zeros(())
    for number in range(steps):
        with autograd.context() as context_id:
            loss = loss_of(lambda x: rpc.rpc_sync("worker1", forward, (x,)), 0, trainer * steps + number)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return float(loss)


def test_trainers_run_freely_and_the_loss_falls(job: Cluster) -> None:
    params = rpc.rpc_sync("worker1", hold, (True,))
    with torch.no_grad():
        before = float(loss_of(lambda x: rpc.rpc_sync("worker1", forward, (x,)), 0, 7))
    futures = [rpc.rpc_async(f"worker{n}", train_freely, (params, n, 30), timeout=150) for n in (2, 3)]
    train_freely(params, 0, 30)
    for future in futures:
        future.wait()
    with torch.no_grad():
        assert float(loss_of(lambda x: rpc.rpc_sync("worker1", forward, (x,)), 0, 7)) < before / 2


def stepped_meanwhile(shared: bool) -> dict[Tensor, Tensor]:
    params = rpc.rpc_sync("worker1", hold, (shared,))
    with autograd.context() as context_id:
        loss = loss_of(lambda x: rpc.rpc_sync("worker1", forward, (x,)), 1, 1)
        contextvars.Context().run(train_freely, params, 0, 1)
        autograd.backward(context_id, [loss])
        return autograd.get_gradients(context_id, "worker1")


def test_without_it_the_error_says_what_to_do(job: Cluster) -> None:
    with pytest.raises(RuntimeError, match=r"another context stepped meanwhile.*telegrad\.nn\.SharedModule"):
        stepped_meanwhile(shared=False)
    assert len(stepped_meanwhile(shared=True)) == 6


def test_outside_a_context_it_is_the_module_itself() -> None:
    model = nn.Linear(2, 2)
    shared = SharedModule(model)
    x = torch.ones(1, 2)
    assert torch.equal(shared(x), model(x))
    again = copy.deepcopy(shared)
    assert torch.equal(again(x), model(x))


def kinds() -> list[nn.Module]:
    return [
        nn.LSTM(4, 3),
        nn.GRU(4, 3, num_layers=2, bidirectional=True),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU()),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ]


def hold_kind(number: int, shared: bool) -> None:
    torch.manual_seed(1)
    module = kinds()[number]
    held["kind"] = SharedModule(module) if shared else module


def forward_kind(x: Tensor) -> Tensor:
    result: Any = held["kind"](x)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("number", range(len(kinds())), ids=lambda n: type(kinds()[n]).__name__)
def test_kinds_of_modules_have_the_same_gradients(job: Cluster, number: int) -> None:
    found = []
    for shared in (False, True):
        rpc.rpc_sync("worker1", hold_kind, (number, shared))
        x = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with autograd.context() as context_id:
            result = rpc.rpc_sync("worker1", forward_kind, (x,)) * rpc.rpc_sync("worker1", forward_kind, (x * 2,))
            autograd.backward(context_id, [result.sum()])
            remote = autograd.get_gradients(context_id, "worker1").values()
            found.append([autograd.get_gradients(context_id)[x], *sorted(remote, key=lambda g: (g.numel(), g.sum()))])
    plain, copied = found
    assert len(plain) == len(copied) > 1
    for one, other in zip(plain, copied, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
