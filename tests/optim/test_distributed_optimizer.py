"""What DistributedOptimizer promises, on real workers, against one process."""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule, remote_parameters, state_dict
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from tests.training_cluster import OWNERS, Stack, Weights, cluster, layer, local_model, loss_of, push, split_model
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(tmp_path_factory.mktemp("job")):
        yield


def distributed_step(model: nn.Module, optimizer: DistributedOptimizer, number: int, **options: Any) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(model, number)])
        optimizer.step(context_id, **options)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def assert_same_parameters(split: nn.Module, whole: nn.Module) -> None:
    trained = state_dict(split)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


ALL_OPTIMIZERS = sorted(
    (
        each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    ),
    key=lambda each: each.__name__,
)


@pytest.mark.parametrize("optimizer_class", ALL_OPTIMIZERS, ids=lambda each: each.__name__)
def test_every_optimizer_of_torch(optimizer_class: type[torch.optim.Optimizer]) -> None:
    split, whole = split_model(), local_model()
    references, parameters = remote_parameters(split), list(whole.parameters())
    if optimizer_class is torch.optim.LBFGS:
        with pytest.raises(TypeError, match="LBFGS evaluates the model again"):
            DistributedOptimizer(optimizer_class, references)
        return
    if optimizer_class is torch.optim.SparseAdam:
        check_sparse_adam()
        return
    if optimizer_class is torch.optim.Muon:  # It takes matrices only.
        references, parameters = references[::2], parameters[::2]
    distributed = DistributedOptimizer(optimizer_class, references, 0.01)
    local = optimizer_class(parameters, 0.01)
    for number in range(4):
        distributed_step(split, distributed, number)
        local_step(whole, local, number)
    assert_same_parameters(split, whole)


def check_sparse_adam() -> None:
    rows = torch.tensor([1, 4, 1])
    remote = RemoteModule("ps1", nn.Embedding, (8, 2), {"sparse": True})
    local = nn.Embedding(8, 2, sparse=True)
    local.load_state_dict(remote.state_dict())
    distributed = DistributedOptimizer(torch.optim.SparseAdam, remote.remote_parameters(), lr=0.1)
    optimizer = torch.optim.SparseAdam(local.parameters(), lr=0.1)
    for _ in range(3):
        with autograd.context() as context_id:
            autograd.backward(context_id, [remote(rows).square().sum()])
            norm = distributed.step(context_id, max_norm=1e9)
        optimizer.zero_grad()
        local(rows).square().sum().backward()
        torch.testing.assert_close(norm, local.weight.grad.to_dense().norm())
        optimizer.step()
    torch.testing.assert_close(remote.state_dict()["weight"], local.weight.detach())


def test_parameters_without_gradient_are_left_alone() -> None:
    used, unused = RemoteModule("ps0", layer, (0, 6, 3)), RemoteModule("ps0", layer, (1, 6, 3))
    elsewhere = RemoteModule("ps2", layer, (2, 6, 3))  # Its owner takes no part in the context at all.
    modules = [used, unused, elsewhere]
    before = [module.state_dict() for module in modules]
    params = [param for module in modules for param in module.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1, momentum=0.9, weight_decay=0.1)
    for number in range(2):
        distributed_step(used, optimizer, number)
    assert not torch.equal(before[0]["weight"], used.state_dict()["weight"])
    for module, state in zip(modules[1:], before[1:], strict=True):
        assert torch.equal(module.state_dict()["weight"], state["weight"])
    assert sorted(optimizer.state_dict()["state"]) == [0, 1]


def test_local_parameters_train_with_remote_ones() -> None:
    split, whole = Stack(["ps0", None, "ps2"]), local_model()
    distributed = DistributedOptimizer(torch.optim.Adam, remote_parameters(split), lr=0.01)
    local = torch.optim.Adam(whole.parameters(), lr=0.01)
    for number in range(3):
        distributed_step(split, distributed, number)
        local_step(whole, local, number)
    assert_same_parameters(split, whole)


def test_groups_have_their_own_options() -> None:
    split, whole = split_model(), local_model()
    references, params = remote_parameters(split), list(whole.parameters())

    def groups(all_params: list[Any]) -> list[dict[str, Any]]:
        # The first group spans two owners, and one owner has parts of both.
        return [{"params": all_params[:3], "lr": 0.3}, {"params": all_params[3:], "weight_decay": 0.1}]

    distributed = DistributedOptimizer(torch.optim.SGD, groups(references), 0.05, momentum=0.9)
    local = torch.optim.SGD(groups(params), 0.05, momentum=0.9)
    assert [group["lr"] for group in distributed.param_groups] == [0.3, 0.05]
    for number in range(4):
        distributed_step(split, distributed, number)
        local_step(whole, local, number)
        for optimizer in (distributed, local):
            optimizer.param_groups[1]["lr"] *= 0.5
    assert_same_parameters(split, whole)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, gamma=0.7)],
        milestones=[3],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_of_torch_drive_all_owners(schedule: str) -> None:
    split, whole = split_model(), local_model()
    distributed = DistributedOptimizer(torch.optim.SGD, remote_parameters(split), lr=0.05, momentum=0.9)
    local = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    schedulers = [SCHEDULES[schedule](optimizer) for optimizer in (distributed, local)]
    for number in range(7):
        distributed_step(split, distributed, number)
        local_step(whole, local, number)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if schedule == "plateau" else []))
        assert [group["lr"] for group in distributed.param_groups] == [group["lr"] for group in local.param_groups]
    assert_same_parameters(split, whole)


def test_accumulating_over_contexts_equals_accumulating_in_grad() -> None:
    split, whole = split_model(), local_model()
    distributed = DistributedOptimizer(torch.optim.AdamW, remote_parameters(split), lr=0.01)
    local = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for number in range(0, 12, 4):
        for part in range(3):
            with autograd.context() as context_id:
                autograd.backward(context_id, [loss_of(split, number + part)])
                distributed.accumulate(context_id)
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(split, number + 3)])
            norm = distributed.step(context_id, scale=0.25, max_norm=0.1)

        local.zero_grad()
        for part in range(4):
            loss_of(whole, number + part).backward()
        for param in whole.parameters():
            param.grad *= 0.25
        assert torch.equal(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
        local.step()
    assert_same_parameters(split, whole)


def test_a_step_may_apply_only_what_was_accumulated_and_applies_it_once() -> None:
    model = RemoteModule("ps0", layer, (0, 6, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=1.0)
    weights = [model.state_dict()["weight"]]
    with autograd.context() as context_id:
        autograd.backward(context_id, [model(torch.ones(6)).sum()])
        optimizer.accumulate(context_id)
    for _ in range(2):
        optimizer.step()
        weights.append(model.state_dict()["weight"])
    torch.testing.assert_close(weights[1], weights[0] - 1.0)
    assert torch.equal(weights[2], weights[1])

    with autograd.context() as context_id:
        autograd.backward(context_id, [model(torch.ones(6)).sum()])
        optimizer.accumulate(context_id)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], weights[2])


def test_clipping_in_place() -> None:
    split, whole = split_model(), local_model()
    references = remote_parameters(split)
    loss_of(whole, 0).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type=1.0)
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(split, 0)])
        assert torch.equal(clip_grad_norm_(context_id, references, 0.1, norm_type=1.0), expected)
        optimizer.step(context_id)
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    assert_same_parameters(split, whole)


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    model = RemoteModule("ps1", layer, (0, 6, 3))
    before = model.state_dict()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [model(torch.full((6,), torch.inf)).sum()])
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.step(context_id, max_norm=1.0, error_if_nonfinite=True)
    assert torch.equal(model.state_dict()["weight"], before["weight"])


def test_state_is_that_of_one_process_and_loads_both_ways() -> None:
    split, whole = split_model(), local_model()
    distributed = DistributedOptimizer(torch.optim.Adam, remote_parameters(split), lr=0.01)
    local = torch.optim.Adam(whole.parameters(), lr=0.01)
    for number in range(3):
        distributed_step(split, distributed, number)
        local_step(whole, local, number)
    gathered, expected = distributed.state_dict(), local.state_dict()
    assert gathered["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(gathered["state"], expected["state"], rtol=0, atol=0)

    # Each goes on from the other's state.
    fresh = DistributedOptimizer(torch.optim.Adam, remote_parameters(split), lr=0.5)
    fresh.load_state_dict(expected)
    local.load_state_dict(gathered)
    for number in range(3, 6):
        distributed_step(split, fresh, number)
        local_step(whole, local, number)
    assert_same_parameters(split, whole)


def test_a_state_of_other_groups_is_refused() -> None:
    model = RemoteModule("ps0", layer, (0, 6, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.5)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this optimizer of \[2\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def test_names_of_parameters_are_kept_as_torch_keeps_them() -> None:
    split, whole = split_model(), local_model()
    named = list(whole.named_parameters())
    references = [(name, param) for (name, _), param in zip(named, remote_parameters(split), strict=True)]
    distributed = DistributedOptimizer(NamedSGD, references, lr=0.05)
    local = NamedSGD(named, lr=0.05)
    assert distributed.param_groups[0]["param_names"] == local.param_groups[0]["param_names"]
    for number in range(3):
        distributed_step(split, distributed, number)
        local_step(whole, local, number)
    assert_same_parameters(split, whole)
    assert distributed.state_dict()["param_groups"] == local.state_dict()["param_groups"]

    # A state with other names gives them, on the owners too: this one no longer knows a bias when it sees one.
    state = local.state_dict()
    state["param_groups"][0]["param_names"] = [f"p{index}" for index in range(len(named))]
    for optimizer in (distributed, local):
        optimizer.load_state_dict(state)
    assert distributed.param_groups[0]["param_names"] == local.param_groups[0]["param_names"]
    distributed_step(split, distributed, 3)
    local_step(whole, local, 3)
    assert_same_parameters(split, whole)


class NamedSGD(torch.optim.SGD):
    """Leaves biases alone, which it knows by their names."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                if name.endswith("bias"):
                    param.grad = None
        super().step(closure)


def test_names_are_for_all_parameters_or_for_none() -> None:
    first, second = RemoteModule("ps0", layer, (0, 6, 3)).remote_parameters()
    with pytest.raises(ValueError, match="Some param names are missing"):
        DistributedOptimizer(torch.optim.SGD, [("weight", first), second], lr=0.1)
    optimizer = DistributedOptimizer(torch.optim.SGD, [("weight", first)], lr=0.1)
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [second]})


def test_groups_added_later_train_as_in_one_process() -> None:
    split, whole = split_model(), local_model()
    references, params = remote_parameters(split), list(whole.parameters())
    distributed = DistributedOptimizer(torch.optim.Adam, references[:1], lr=0.05)
    local = torch.optim.Adam(params[:1], lr=0.05)
    # The second owner is known, the others are new; and the options are the group's own, or the defaults.
    for number, (first, last, options) in enumerate([(1, 2, {}), (2, len(params), {"lr": 0.2, "betas": (0.5, 0.9)})]):
        distributed_step(split, distributed, number)
        local_step(whole, local, number)
        distributed.add_param_group({"params": references[first:last], **options})
        local.add_param_group({"params": params[first:last], **options})
    schedulers = [lr_scheduler.ExponentialLR(optimizer, gamma=0.5) for optimizer in (distributed, local)]
    for number in range(2, 5):
        distributed_step(split, distributed, number, max_norm=0.1)
        local.zero_grad()
        loss_of(whole, number).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        local.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same_parameters(split, whole)
    gathered, expected = distributed.state_dict(), local.state_dict()
    assert gathered["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(gathered["state"], expected["state"], rtol=0, atol=0)
    distributed.load_state_dict(expected)


def test_a_group_that_one_owner_refuses_is_taken_by_none() -> None:
    here, there = (RemoteModule(owner, layer, (0, 6, 3)).remote_parameters() for owner in ("ps0", "ps1"))
    optimizer = DistributedOptimizer(torch.optim.SGD, [*here[:1], *there[:1]], lr=0.1)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="more than one parameter group") as refused:
        optimizer.add_param_group({"params": [here[1], there[0]]})
    assert "ps1" in str(refused.value)
    assert optimizer.state_dict() == before
    optimizer.add_param_group({"params": [here[1], there[1]]})
    assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == [[0, 1], [2, 3]]


class FailsOn(torch.optim.SGD):
    """Fails on one worker, in its constructor or in its step."""

    def __init__(self, params: Any, worker: str, where: str) -> None:
        super().__init__(params, lr=0.1)
        self.fails = rpc.get_worker_info().name == worker
        if self.fails and where == "constructor":
            raise LookupError("no room")

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise ArithmeticError("cannot divide")
        super().step(closure)


def test_an_owners_error_is_named_and_the_others_are_reported() -> None:
    references = remote_parameters(split := split_model())
    with pytest.raises(LookupError, match="no room") as constructing:
        DistributedOptimizer(FailsOn, references, "ps1", "constructor")
    assert "ps1" in str(constructing.value)

    optimizer = DistributedOptimizer(FailsOn, references, "ps1", "step")
    with pytest.raises(ArithmeticError, match="cannot divide") as stepping:
        distributed_step(split, optimizer, 0)
    assert "ps1" in str(stepping.value)
    assert any("'ps0', 'ps2'" in note for note in stepping.value.__notes__)


class FailsAtHighRates(torch.optim.SGD):
    """Fails on one worker while its learning rate is above 1."""

    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["lr"] > 1 and rpc.get_worker_info().name == "ps1":
            raise ArithmeticError("too fast")
        super().step(closure)


def rates(local: rpc.RRef) -> list[float]:
    return [group["lr"] for group in local.local_value().optimizer.param_groups]


def test_an_option_changed_back_after_a_step_that_failed_holds_on_all_owners() -> None:
    optimizer = DistributedOptimizer(FailsAtHighRates, remote_parameters(split := split_model()), lr=0.5)
    optimizer.param_groups[0]["lr"] = 5.0
    with pytest.raises(ArithmeticError, match="too fast"):
        distributed_step(split, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    distributed_step(split, optimizer, 1)
    owners = [rpc.rpc_sync(local.owner(), rates, (local,)) for local in optimizer.remote_optimizers]
    assert owners == [[0.5], [0.5], [0.5]]


class WaitsAtHighRates(torch.optim.SGD):
    """Steps only when it may, while its learning rate is above 1."""

    waits, may_go_on = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["lr"] > 1:
            self.waits.set()
            assert self.may_go_on.wait(90)
        super().step(closure)

    @classmethod
    def is_in_a_step(cls) -> bool:
        return cls.waits.wait(90)

    @classmethod
    def go_on(cls) -> None:
        cls.may_go_on.set()


def test_a_group_added_while_a_step_tells_of_new_options_is_known_after_it() -> None:
    first, second = (RemoteModule(owner, layer, (0, 6, 3)).remote_parameters() for owner in ("ps0", "ps1"))
    optimizer = DistributedOptimizer(WaitsAtHighRates, first, lr=0.5)
    optimizer.param_groups[0]["lr"] = 2.0
    step = threading.Thread(target=optimizer.step)
    add = threading.Thread(target=optimizer.add_param_group, args=({"params": second, "lr": 0.25},))
    step.start()
    assert rpc.rpc_sync("ps0", WaitsAtHighRates.is_in_a_step)
    add.start()
    wait_until(lambda: optimizer._telling.locked() or not add.is_alive())  # it waits, or is done
    rpc.rpc_sync("ps0", WaitsAtHighRates.go_on)
    for thread in (step, add):
        thread.join(90)
    optimizer.param_groups[1]["lr"] = 0.125
    optimizer.step()
    assert [rpc.rpc_sync(local.owner(), rates, (local,)) for local in optimizer.remote_optimizers] == [[2.0], [0.125]]
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [2.0, 0.125]


def test_a_step_that_finds_no_gradient_says_so_once() -> None:
    model = RemoteModule("ps0", layer, (0, 6, 3))
    copies = [parameter.to_here() for parameter in model.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, copies, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with autograd.context() as context_id:
                autograd.backward(context_id, [model(torch.ones(1, 6)).sum()])
                optimizer.step(context_id)
    (told,) = [each for each in caught if "changed none of the parameters" in str(each.message)]
    assert told.filename == __file__
    assert "fetched from another worker is a copy" in str(told.message)


def test_a_step_that_finds_no_gradient_after_one_that_did_says_nothing() -> None:
    model = RemoteModule("ps0", layer, (0, 6, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with autograd.context() as context_id:
            autograd.backward(context_id, [model(torch.ones(1, 6)).sum()])
            optimizer.step(context_id)
        with autograd.context() as context_id:
            optimizer.step(context_id)


class RefusesHighRates(torch.optim.SGD):
    """Cannot load a state on one worker if its learning rate is above 1."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["param_groups"][0]["lr"] > 1 and rpc.get_worker_info().name == "ps1":
            raise ArithmeticError("too fast")
        super().load_state_dict(state_dict)


def test_options_of_a_state_that_not_all_owners_took_are_given_back() -> None:
    optimizer = DistributedOptimizer(RefusesHighRates, remote_parameters(split := split_model()), lr=0.5)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ArithmeticError, match="too fast"):
        optimizer.load_state_dict(state)
    distributed_step(split, optimizer, 0)
    owners = [rpc.rpc_sync(local.owner(), rates, (local,)) for local in optimizer.remote_optimizers]
    assert owners == [[0.5], [0.5], [0.5]]


def test_an_unknown_context_is_refused_before_any_owner_is_asked() -> None:
    model = RemoteModule("ps0", layer, (0, 6, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.5)
    for use in (optimizer.step, optimizer.accumulate):
        with pytest.raises(RuntimeError, match="context"):
            use(12345)


TRAINERS, PUSHES = 3, 20


def expected_weights(size: int) -> torch.Tensor:
    """SGD without momentum: the order of the steps does not matter, that each is applied whole does."""
    return -0.5 * PUSHES * sum(torch.full((size,), float(1 + trainer)) for trainer in range(TRAINERS))


def check_server(weights: Any) -> None:
    for value in weights.rpc_sync().values():
        assert torch.equal(value, expected_weights(64))
    assert weights.rpc_sync().stray_gradients() == 0


def test_three_trainers_in_threads() -> None:
    weights = rpc.remote("ps0", Weights, args=(64,))
    references = weights.rpc_sync().references()
    failures: list[BaseException] = []

    def train(trainer: int) -> None:
        try:
            optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.5)
            for _ in range(PUSHES):
                push(weights, optimizer, torch.full((64,), float(1 + trainer)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in range(TRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    check_server(weights)


def train_against(weights: Any, trainer: int) -> None:
    """A trainer in a process of its own."""
    optimizer = DistributedOptimizer(torch.optim.SGD, weights.rpc_sync().references(), lr=0.5)
    for _ in range(PUSHES):
        push(weights, optimizer, torch.full((64,), float(1 + trainer)))


def test_three_trainers_in_processes() -> None:
    weights = rpc.RRef(Weights(64))  # Here: the three owners are the trainers this time.
    futures = [
        rpc.rpc_async(name, train_against, args=(weights, trainer), timeout=150) for trainer, name in enumerate(OWNERS)
    ]
    for future in futures:
        future.wait()
    check_server(weights)
