"""What observes the step of an optimizer sees it, though torch's wrapper around it is left out where nothing does."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry
from telegrad.errors import RRefError
from telegrad.optim import DistributedOptimizer
from telegrad.optim.owner import on_owner
from telegrad.optim.unobserved import is_observed, step_of
from telegrad.rref.value_on_owner import id_for_owner
from tests.training_cluster import cluster


def sgd() -> torch.optim.SGD:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


def value(optimizer: torch.optim.Optimizer) -> list[float]:
    found: list[float] = optimizer.param_groups[0]["params"][0].tolist()
    return found


def test_a_step_that_nobody_observes_is_the_same_step() -> None:
    optimizer = sgd()
    step = step_of(optimizer)
    assert step != optimizer.step
    step()
    assert value(optimizer) == [0.5, 0.5]


def test_hooks_of_the_optimizer_see_it() -> None:
    for register in (torch.optim.Optimizer.register_step_pre_hook, torch.optim.Optimizer.register_step_post_hook):
        optimizer, seen = sgd(), []
        register(optimizer, lambda *given, seen=seen: seen.append(given))
        assert is_observed(optimizer)
        step_of(optimizer)()
        assert len(seen) == 1 and value(optimizer) == [0.5, 0.5]


def test_hooks_of_all_optimizers_see_it() -> None:
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        optimizer, seen = sgd(), []
        handle = register(lambda *given, seen=seen: seen.append(given))
        try:
            step_of(optimizer)()
        finally:
            handle.remove()
        assert len(seen) == 1 and not is_observed(optimizer)


def test_a_profiler_sees_it() -> None:
    with torch.profiler.profile() as profile:
        step_of(sgd())()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_a_step_of_the_objects_own_is_that_step() -> None:
    optimizer, seen = sgd(), []
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts one there
    assert step_of(optimizer) == optimizer.step
    optimizer.step = lambda: seen.append(1)  # type: ignore[assignment,return-value]
    step_of(optimizer)()
    assert seen == [1]


def test_a_step_that_torch_has_not_wrapped_is_left_alone() -> None:
    class Plain:
        def step(self) -> str:
            return "stepped"

    assert step_of(Plain())() == "stepped"  # type: ignore[arg-type] # what a user's factory may make


def test_an_object_whose_class_has_no_step_takes_its_own() -> None:
    class HandsOn:
        def __init__(self) -> None:
            self.inner = sgd()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    optimizer = HandsOn()
    step_of(optimizer)()  # type: ignore[arg-type] # as above
    assert value(optimizer.inner) == [0.5, 0.5]


def noting(step: Any) -> Any:
    """A user's wrapper, which takes over all that torch has noted at the step."""

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        _noted.append(type(self).__name__)
        return step(self, *args, **kwargs)

    return wrapper


_noted: list[str] = []


def test_a_users_wrapper_around_torchs_is_called() -> None:
    sgd()  # torch wraps the step of a class when the first is made

    class Noting(torch.optim.SGD):
        step = noting(torch.optim.SGD.step)

    _noted.clear()
    step_of(Noting([torch.nn.Parameter(torch.ones(2))], lr=0.5))()
    assert _noted == ["Noting"]


# --- the trainer's side ---


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(tmp_path_factory.mktemp("job"), ("ps0", "ps1")):
        yield


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def doubled(reference: Any) -> torch.Tensor:
    result: torch.Tensor = reference.local_value() * 2
    return result


class Louder(DistributedOptimizer):
    """A user's own, whose step torch wraps."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class Wrapped(DistributedOptimizer):
    """Another, whose step torch takes for one that it has wrapped."""

    step = noting(DistributedOptimizer.step)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("optimizer_class", [DistributedOptimizer, Louder, Wrapped])
def test_a_distributed_step_is_observed_once(optimizer_class: type[DistributedOptimizer]) -> None:
    reference = rpc.remote("ps0", parameter)
    optimizer = optimizer_class(torch.optim.SGD, [reference], lr=0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(f"before, {given[2]}"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with autograd.context() as context_id, torch.profiler.profile() as profile:
        autograd.backward(context_id, [rpc.rpc_sync("ps0", doubled, args=(reference,)).sum()])
        optimizer.step(context_id, scale=0.5)
    assert seen == ["before, {'scale': 0.5}", "after"]
    names = [event.name for event in profile.events()]
    assert names.count(f"Optimizer.step#{optimizer_class.__name__}.step") == 1
    assert reference.to_here().tolist() == [0.5, 0.5]


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_step_adds_no_participant() -> None:
    references = [rpc.remote(owner, parameter) for owner in ("ps0", "ps1")]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("ps0", doubled, args=(references[0],)).sum()])
        optimizer.step(context_id)
        assert registry().find(context_id).participants == {rpc.get_worker_info("ps0").id}
    assert [reference.to_here().tolist() for reference in references] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_what_an_owner_keeps_no_more_is_named() -> None:
    reference = rpc.remote("ps0", parameter)
    assert rpc.rpc_sync("ps0", on_owner, args=(id_for_owner(reference), "tolist")) == [1.0, 1.0]
    with pytest.raises(RRefError, match="'ps0' keeps no value"):
        rpc.rpc_sync("ps0", on_owner, args=((id_for_owner(reference) or 0) + 1_000_000, "sum"))
