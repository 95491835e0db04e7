"""Activation checkpointing, with and without reentrancy, around calls and inside them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.features.table import add, program
from tests.features.world import call, call_on, data, leaf, module, param


def scaled(x: Tensor) -> Tensor:
    return (x * param("scale", 3)).sin()


def squared_there(x: Tensor) -> Tensor:
    return call(scaled, x) ** 2


def around_a_call(reentrant: bool) -> Tensor:
    x = leaf(2, 3)
    result: Tensor = checkpoint(squared_there, x * 2, use_reentrant=reentrant)
    return result * x


def with_local_parameter(x: Tensor) -> Tensor:
    return squared_there(x) * param("local", 3)


def around_a_call_and_a_parameter(reentrant: bool) -> Tensor:
    result: Tensor = checkpoint(with_local_parameter, leaf(2, 3) * 2, use_reentrant=reentrant)
    return result


def two_layers(x: Tensor) -> Tensor:
    return module("layers", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))(x)


def checkpointed_there(x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(two_layers, x * 2, use_reentrant=reentrant)


def inside_a_call(reentrant: bool) -> Tensor:
    x = leaf(2, 3)
    return call(checkpointed_there, x, reentrant) + x


def shared_parameter(x: Tensor, reentrant: bool) -> Tensor:
    """Used inside a checkpoint and outside of it."""
    return checkpoint(scaled, x, use_reentrant=reentrant) * param("scale", 3)


def a_parameter_in_and_out(reentrant: bool) -> Tensor:
    return call(shared_parameter, leaf(2, 3), reentrant)


def calls_on(x: Tensor) -> Tensor:
    return call_on("worker2", scaled, x) * param("between", 3)


def checkpoint_around_a_nested_call(x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(calls_on, x * 3, use_reentrant=reentrant)


def inside_a_call_around_another(reentrant: bool) -> Tensor:
    return call(checkpoint_around_a_nested_call, leaf(2, 3), reentrant)


def sequential_there(x: Tensor, reentrant: bool) -> Tensor:
    net = module("net", lambda: nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.GELU()) for _ in range(4)]))
    return checkpoint_sequential(net, 2, x, use_reentrant=reentrant)


def sequential_in_a_call(reentrant: bool) -> Tensor:
    return call(sequential_there, leaf(2, 3) * 1, reentrant)


def nested_checkpoints_there(x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda y: checkpoint(scaled, y * 2, use_reentrant=reentrant) + y, x, use_reentrant=reentrant)


def checkpoint_in_checkpoint(reentrant: bool) -> Tensor:
    return call(nested_checkpoints_there, leaf(2, 3), reentrant)


def in_and_around(reentrant: bool) -> Tensor:
    return checkpoint(lambda x: call(checkpointed_there, x, reentrant), leaf(2, 3) * 1, use_reentrant=reentrant)


def dropped_there(x: Tensor, reentrant: bool) -> Tensor:
    torch.manual_seed(3)
    return checkpoint(nn.functional.dropout, x * param("w", 3), use_reentrant=reentrant)


def with_dropout(reentrant: bool) -> Tensor:
    return call(dropped_there, leaf(4, 3), reentrant)


def pair_there(x: Tensor, y: Tensor, reentrant: bool) -> Any:
    return checkpoint(lambda a, b: (a * b, a + b, 7), x, y * 2, use_reentrant=reentrant)


def several_tensors(reentrant: bool) -> Any:
    first, second, _ = call(pair_there, leaf(3), leaf(3), reentrant)
    return first * second


def twice_there(x: Tensor, reentrant: bool) -> Tensor:
    return checkpointed_there(checkpointed_there(x, reentrant), reentrant)


def one_module_checkpointed_twice(reentrant: bool) -> Tensor:
    return call(twice_there, leaf(2, 3), reentrant)


def hooked_there(x: Tensor, reentrant: bool) -> Tensor:
    from tests.features.world import log

    weight = param("hooked", 3)
    weight.register_hook(lambda g: log("hook", g))
    weight.register_post_accumulate_grad_hook(lambda p: log("accumulated", p.grad))
    return checkpoint(lambda y: y * weight, x * 1, use_reentrant=reentrant)


def hooks_on_a_checkpointed_parameter(reentrant: bool) -> Tensor:
    return call(hooked_there, leaf(2, 3), reentrant)


for _make in (
    *(around_a_call, around_a_call_and_a_parameter, inside_a_call, a_parameter_in_and_out),
    *(inside_a_call_around_another, sequential_in_a_call, checkpoint_in_checkpoint, in_and_around),
    *(with_dropout, several_tensors, one_module_checkpointed_twice, hooks_on_a_checkpointed_parameter),
):
    for _reentrant in (False, True):
        _name = f"checkpoint_{'reentrant' if _reentrant else 'plain'}_{_make.__name__}"
        add(_name, partial(_make, _reentrant))


@program
def checkpoint_with_early_stop_off() -> Any:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    with set_checkpoint_early_stop(False):
        return checkpoint(squared_there, leaf(2, 3) + data(2, 3), use_reentrant=False)
