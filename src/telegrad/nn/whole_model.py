"""A model made of local and remote modules, seen as one: its parameters and its state, one round trip per owner.

The torch methods `model.state_dict()` and `model.load_state_dict()` work on such a model too, asking for each remote
module in turn. Here the exchange with all owners happens first and at once; then the torch method runs and picks up the
results, so hooks, key order, `strict` and error texts are torch's own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from telegrad import rpc
from telegrad.nn import owner_side
from telegrad.nn.remote_module import _RemoteModule, states_read, states_written


def remote_parameters(model: nn.Module) -> list[Any]:
    """References to all parameters of the model, local ones included, for a DistributedOptimizer.

    Examples:
        >>> model = torch.nn.Sequential(RemoteModule("worker1", torch.nn.Linear, args=(2, 1)))
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, nn.remote_parameters(model), lr=0.1)
    """
    return [param for _, param in named_remote_parameters(model)]


def named_remote_parameters(model: nn.Module) -> list[tuple[str, Any]]:
    """The same with their names, in the order in which one process would list them.

    Examples:
        >>> model = torch.nn.Sequential(RemoteModule("worker1", torch.nn.Linear, args=(2, 1)))
        >>> [name for name, _ in nn.named_remote_parameters(model)]
        ['0.weight', '0.bias']
    """
    remote = _remote_modules(model)
    found = _ask_owners(remote, lambda modules: (owner_side.parameter_references, _references(modules), True))
    named: list[tuple[str, Any]] = []
    seen: set[int] = set()
    for prefix, module in _modules(model):
        if isinstance(module, _RemoteModule):
            named.extend((_join(prefix, name), param) for name, param in found[id(module)])
            continue
        for name, param in module.named_parameters(prefix, recurse=False):
            if id(param) not in seen:  # A shared parameter is optimized once, under its first name.
                seen.add(id(param))
                named.append((name, rpc.RRef(param)))
    return named


def state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of the whole model, as `model.state_dict()` gives it.

    Examples:
        >>> there = RemoteModule("worker1", torch.nn.Linear, args=(2, 1))
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), there)
        >>> list(nn.state_dict(model))
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    exchanged = _ask_owners(_remote_modules(model), lambda modules: (owner_side.read_states, _references(modules)))
    token = states_read.set(exchanged)
    try:
        return model.state_dict()
    finally:
        states_read.reset(token)


def load_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Give every module of the model its part of `state`; returns and raises what `model.load_state_dict()` does.

    Examples:
        >>> model = torch.nn.Sequential(RemoteModule("worker1", torch.nn.Linear, args=(2, 1)))
        >>> nn.load_state_dict(model, nn.state_dict(model))
        <All keys matched successfully>
    """
    remote = _remote_modules(model)
    parts = {id(module): _part(state, _join(prefix, "")) for prefix, module in remote}

    def writing(modules: list[_RemoteModule]) -> tuple[Any, ...]:
        return owner_side.write_states, _references(modules), [parts[id(module)] for module in modules], assign

    exchanged = _ask_owners(remote, writing)
    token = states_written.set(exchanged)
    try:
        return model.load_state_dict(state, strict=strict, assign=assign)
    finally:
        states_written.reset(token)


def _ask_owners(
    remote: list[tuple[str, _RemoteModule]], call: Callable[[list[_RemoteModule]], tuple[Any, ...]]
) -> dict[int, Any]:
    """One call to each owner for all its modules together; the answers, by the identity of the RemoteModule."""
    by_owner: dict[str, list[_RemoteModule]] = {}
    for _, module in remote:
        by_owner.setdefault(module.module_rref.owner_name(), []).append(module)
    futures = {}
    for owner, modules in by_owner.items():
        function, *args = call(modules)
        futures[owner] = rpc.rpc_async(owner, function, args=tuple(args))
    answers: dict[int, Any] = {}
    for owner, modules in by_owner.items():
        answers.update(zip(map(id, modules), futures[owner].wait(), strict=True))
    return answers


def _references(modules: list[_RemoteModule]) -> list[Any]:
    return [module.module_rref for module in modules]


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [("", model)] if isinstance(model, _RemoteModule) else list(model.named_modules())


def _remote_modules(model: nn.Module) -> list[tuple[str, _RemoteModule]]:
    return [(prefix, module) for prefix, module in _modules(model) if isinstance(module, _RemoteModule)]


def _part(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
