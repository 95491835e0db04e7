"""How each kind of value gives its state and takes it back, exactly.

Exactly is more than `state_dict` promises: a module's state here has its buffers that are not persistent, its modes and
which parameters are frozen; an optimizer's has its tensors in their own dtype, and gradients it has accumulated. What
is given are the live tensors; `copies.py` copies them.
"""

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from telegrad.nn.remote_module import _RemoteModule
from telegrad.optim.owner import LocalOptimizer


class Access(NamedTuple):
    """How the state of a value is read and written."""

    save: Callable[[Any], Any]
    load: Callable[[Any, Any], Any]


def access_to(value: Any) -> Access:
    """How to read and write the state of a value that brings no functions of its own."""
    for kind, access in _KINDS:
        if isinstance(value, kind):
            return access
    if isinstance(value, nn.Module) and type(value).state_dict is nn.Module.state_dict:
        return Access(_save_module, _load_module)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return Access(_save_by_method, _load_by_method)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return Access(lambda generator: generator.bit_generator.state, _load_numpy)
    raise TypeError(
        f"a {type(value).__name__} has no state_dict and load_state_dict; give `save=`, a function that returns its "
        "state, and `load=`, one that takes the value and a state"
    )


# --- modules ---


def _save_module(module: nn.Module) -> dict[str, Any]:
    tensors, frozen, training, extra = {}, [], [], {}
    for prefix, part in _local_modules(module):
        training.append(part.training)
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                tensors[f"{prefix}.{name}"] = tensor.detach()
        frozen += [f"{prefix}.{n}" for n, p in part._parameters.items() if p is not None and not p.requires_grad]
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            extra[prefix] = part.get_extra_state()
    return {"tensors": tensors, "frozen": frozen, "training": training, "extra": extra}


def _load_module(module: nn.Module, state: dict[str, Any]) -> None:
    tensors, frozen = state["tensors"], set(state["frozen"])
    parts = _local_modules(module)
    with torch.no_grad():
        for (prefix, part), training in zip(parts, state["training"], strict=True):
            part.training = training
            for name, param in part._parameters.items():
                if param is not None:
                    param.copy_(tensors[f"{prefix}.{name}"])  # in place: optimizers hold this very tensor
                    param.requires_grad_(f"{prefix}.{name}" not in frozen)
            for name, buffer in part._buffers.items():
                _load_buffer(part, name, buffer, tensors.get(f"{prefix}.{name}"))
            if prefix in state["extra"]:
                part.set_extra_state(state["extra"][prefix])


def _load_buffer(part: nn.Module, name: str, buffer: torch.Tensor | None, saved: torch.Tensor | None) -> None:
    if buffer is not None and saved is not None and buffer.shape == saved.shape and buffer.dtype == saved.dtype:
        buffer.copy_(saved)
    elif saved is not None:
        part._buffers[name] = saved if buffer is None else saved.to(buffer.device)
    else:
        part._buffers[name] = None


def _local_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules of other workers are no part of the state of this one."""
    return [(prefix, part) for prefix, part in module.named_modules() if not isinstance(part, _RemoteModule)]


# --- optimizers ---


def _save_local_optimizer(local: LocalOptimizer) -> dict[str, Any]:
    numbers = {param: number for number, param in enumerate(local.params)}
    accumulated = {numbers[param]: gradient for param, gradient in local.accumulated.items()}
    return {"optimizer": local.optimizer.state_dict(), "accumulated": accumulated}


def _load_local_optimizer(local: LocalOptimizer, state: dict[str, Any]) -> None:
    _load_optimizer(local.optimizer, state["optimizer"])
    params = local.params
    local.accumulated = {params[number]: gradient for number, gradient in state["accumulated"].items()}


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    # torch casts what it loads to the parameter's dtype. An optimizer that keeps its state in another meant it.
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        for key, saved in state["state"].get(number, {}).items():
            loaded = optimizer.state[param].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != saved.dtype:
                optimizer.state[param][key] = saved.to(loaded.device)


# --- anything else ---


def _save_by_method(value: Any) -> Any:
    return value.state_dict()


def _load_by_method(value: Any, state: Any) -> None:
    value.load_state_dict(state)


def _load_random(generator: random.Random, state: Any) -> None:
    version, numbers, gauss = state
    generator.setstate((version, tuple(numbers), gauss))


def _load_numpy(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


_KINDS: list[tuple[type, Access]] = [
    (LocalOptimizer, Access(_save_local_optimizer, _load_local_optimizer)),
    (torch.optim.Optimizer, Access(_save_by_method, _load_optimizer)),
    (torch.Generator, Access(torch.Generator.get_state, torch.Generator.set_state)),
    (random.Random, Access(random.Random.getstate, _load_random)),
]
