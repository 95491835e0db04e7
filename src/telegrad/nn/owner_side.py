"""What runs on the worker that owns a module: making it, calling it, reading and writing its parameters.

Everything here is called by name from another worker, takes a reference to the module and returns what can be sent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from telegrad import rpc


def create_module(
    module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    """The module itself; it stays here, and the caller holds a reference to it."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    try:
        return module.to(device)
    except Exception as error:
        error.add_note(f"in bringing {type(module).__name__} to {device!r} on worker {rpc.get_worker_info().name!r}")
        raise


def run_forward(module: Any, device: str, keep_device: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module. Tensors are brought to its accelerator, if any, and results, unless mapped, to the host."""
    here = torch.device(device)
    forward = module.local_value()  # first: if it could not be made, that is the error
    if here.type == "cpu":
        return forward(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(here), (args, kwargs))
    result = forward(*args, **kwargs)
    return result if keep_device else pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result)


def set_mode(module: Any, training: bool) -> None:
    """`train(training)` on the module."""
    module.local_value().train(training)


def set_requires_grad(module: Any, requires_grad: bool) -> None:
    """`requires_grad_(requires_grad)` on the module."""
    module.local_value().requires_grad_(requires_grad)


def zero_grad(module: Any, set_to_none: bool) -> None:
    """`zero_grad(set_to_none)` on the module."""
    module.local_value().zero_grad(set_to_none)


def convert(module: Any, dtype: torch.dtype) -> None:
    """`to(dtype)` on the module."""
    module.local_value().to(dtype)


def parameter_references(modules: Sequence[Any], recurse: bool) -> list[list[tuple[str, Any]]]:
    """For each module, its parameters by name and reference; one that several share is listed once, with the first."""
    listed: set[torch.Tensor] = set()
    found = []
    for module in modules:
        named = module.local_value().named_parameters(recurse=recurse)
        new = [(name, param) for name, param in named if param not in listed]
        listed.update(param for _, param in new)
        found.append([(name, rpc.RRef(param)) for name, param in new])
    return found


def read_states(modules: Sequence[Any]) -> list[dict[str, Any]]:
    """Each module's state dict, copied to host memory: training here may go on while it is under way."""
    return [_to_host(module.local_value().state_dict()) for module in modules]


def write_states(
    modules: Sequence[Any], states: Sequence[dict[str, Any]], assign: bool
) -> list[tuple[list[str], list[str], str]]:
    """Load each module's state; for each: keys it missed, keys it did not expect, and what did not fit, if any."""
    return [_write_state(module.local_value(), state, assign) for module, state in zip(modules, states, strict=True)]


def _write_state(module: nn.Module, state: dict[str, Any], assign: bool) -> tuple[list[str], list[str], str]:
    if assign:
        # Assigned tensors become the parameters: they must be here, on the module's device, and nobody else's.
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        state = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), state)
    try:
        result = module.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as misfit:
        return [], [], str(misfit)
    return list(result.missing_keys), list(result.unexpected_keys), ""


def _to_host(state: dict[str, Any]) -> dict[str, Any]:
    # Values change in place and not the dict: it also carries the modules' versions as `_metadata`.
    for key, value in state.items():
        state[key] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)
    return state
