"""Does a distributed program compute the gradients that one process would? Run it both ways and compare.

A program here is a function that makes a loss with calls to workers, and names what it wants the gradients of:

    def program():
        server = rpc.remote("worker1", nn.Linear, args=(4, 2))
        w = torch.ones(4, 4, requires_grad=True)
        y = rpc.rpc_sync(server.owner(), forward, args=(server, torch.ones(1, 4) @ w))
        return y.sum(), {"w": w, "server": server}

    check_distributed_grads(program)
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.launch import local_cluster
from telegrad.rpc.current import current_agent
from telegrad.testing.one_process import LocalRRef, OneProcess

Named = Mapping[str, Any]
Program = Callable[..., tuple[Tensor, Named]]


class Gradient(NamedTuple):
    """The gradient of one named tensor, and the worker it lives on."""

    worker: str
    value: Tensor | None


def check_distributed_grads(
    program: Program,
    *args: Any,
    workers: int = 3,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> dict[str, Tensor | None]:
    """Run `program(*args)` on a cluster and in one process, and compare the loss and all named gradients.

    Args:
        program: makes a scalar loss by calls to workers and returns it with a dict of what to compare: tensors that
            require a gradient, modules (their parameters), and references to either on other workers. It calls neither
            `backward` nor an optimizer.
        workers: how many to start. If this process is a worker already (a fixture of `cluster`), that job is used.
        seed: each worker's random numbers start from this plus its rank, both times.
        rtol: relative tolerance, as in `torch.testing.assert_close`; by default that of the dtype.
        atol: absolute tolerance, likewise.

    Returns the gradients by name. AssertionError shows the first difference: whose gradient, on which worker, which
    element, and both values.

    Examples:
        ```python
        def program():
            w = torch.ones(2, requires_grad=True)
            return rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum(), {"w": w}

        check_distributed_grads(program, workers=2)  # {"w": tensor([3., 3.])}
        ```
    """
    with _cluster(workers) as names:
        loss, found = _distributed(program, args, names, seed)
    expected_loss, expected = _in_one_process(program, args, names, seed)
    _compare_losses(loss, expected_loss, rtol, atol)
    if missing := sorted(found.keys() ^ expected.keys()):
        raise AssertionError(f"the two runs name different tensors; only one of them has {missing}")
    for name, gradient in found.items():
        _compare(name, gradient, expected[name].value, rtol, atol)
    return {name: gradient.value for name, gradient in found.items()}


@contextlib.contextmanager
def _cluster(workers: int) -> Iterator[list[str]]:
    agent = current_agent()
    if agent is not None:
        yield [member.name for member in agent.peers.everyone()]
        return
    with local_cluster(workers) as cluster:
        yield list(cluster.names)


# --- on a cluster ---


def _distributed(program: Program, args: Any, names: list[str], seed: int) -> tuple[Tensor, dict[str, Gradient]]:
    for rank, name in enumerate(names):
        rpc.rpc_sync(name, _seed, args=(seed + rank,))
    with autograd.context() as context_id:
        loss, named = program(*args)
        autograd.backward(context_id, [loss])
        found: dict[str, Gradient] = {}
        for name, value in _places(named):
            if isinstance(value, rpc.RRef):
                owner = value.owner()
                there = rpc.rpc_sync(owner, _gradients_of_reference, args=(name, value, context_id))
                found.update({each: Gradient(owner.name, gradient) for each, gradient in there.items()})
            else:
                here = _gradients_of(name, value, context_id)
                found.update({each: Gradient(names[0], gradient) for each, gradient in here.items()})
    return loss.detach(), found


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _gradients_of_reference(name: str, reference: Any, context_id: int) -> dict[str, Tensor | None]:
    return _gradients_of(name, reference.local_value(), context_id)


def _gradients_of(name: str, value: Any, context_id: int) -> dict[str, Tensor | None]:
    gradients = autograd.get_gradients(context_id)
    return {each: gradients.get(tensor) for each, tensor in _leaves(name, value)}


# --- in one process ---


def _in_one_process(program: Program, args: Any, names: list[str], seed: int) -> tuple[Tensor, dict[str, Gradient]]:
    process = OneProcess(names, seed)
    with process.instead_of_workers():
        loss, named = program(*args)
    leaves: dict[str, tuple[str, Tensor]] = {}
    for name, value in _places(named):
        owner, inner = (value.owner_name(), value.local_value()) if isinstance(value, LocalRRef) else (names[0], value)
        leaves.update({each: (owner, tensor) for each, tensor in _leaves(name, inner)})
    tensors = [tensor for _, tensor in leaves.values()]
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True) if tensors else ()
    pairs = zip(leaves.items(), gradients, strict=True)
    return loss.detach(), {name: Gradient(owner, gradient) for (name, (owner, _)), gradient in pairs}


# --- what a program named ---


def _places(named: Named) -> Iterator[tuple[str, Any]]:
    """Each value with its name; a model that has remote modules inside also yields a reference for each of those."""
    for name, value in named.items():
        if hasattr(value, "get_module_rref"):
            yield name, value.get_module_rref()
            continue
        yield name, value
        if isinstance(value, nn.Module):
            for inner_name, module in value.named_modules():
                if hasattr(module, "get_module_rref"):
                    yield f"{name}.{inner_name}", module.get_module_rref()


def _leaves(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, nn.Module):
        return [(f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters()]
    raise TypeError(f"the program named {name!r}, a {type(value).__name__}; only tensors and modules have gradients")


# --- comparing ---


def _compare_losses(found: Tensor, expected: Tensor, rtol: float | None, atol: float | None) -> None:
    if (difference := _difference(found, expected, rtol, atol)) is not None:
        raise AssertionError(
            f"the two runs part before backward: {difference} of the loss. Does the program use random numbers or "
            "state that a worker keeps from an earlier run?"
        )


def _compare(name: str, found: Gradient, expected: Tensor | None, rtol: float | None, atol: float | None) -> None:
    where = f"the gradient of {name!r} on worker {found.worker!r}"
    if found.value is None and expected is None:
        return
    if found.value is None or expected is None:
        has, has_not = (
            ("one process", "the distributed run") if found.value is None else ("the distributed run", "one process")
        )
        raise AssertionError(f"first difference at {where}: {has} has one, {has_not} has none")
    if (difference := _difference(found.value, expected, rtol, atol)) is not None:
        raise AssertionError(f"first difference at {where}: {difference}")


def _difference(found: Tensor, expected: Tensor, rtol: float | None, atol: float | None) -> str | None:
    """The first element that differs, in words; None if all are close."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    for what in ("shape", "dtype"):
        if getattr(found, what) != getattr(expected, what):
            return f"distributed it has {what} {getattr(found, what)}, in one process {getattr(expected, what)}"
    if rtol is None or atol is None:
        default_rtol, default_atol = torch.testing._comparison.get_tolerances(found, expected, rtol=None, atol=None)
        rtol, atol = default_rtol if rtol is None else rtol, default_atol if atol is None else atol
    apart = ~torch.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    count = int(apart.sum())
    if not count:
        return None
    index = tuple(apart.nonzero()[0].tolist())
    return (
        f"distributed {found[index].item():.9g}, in one process {expected[index].item():.9g} at element {list(index)} "
        f"({count} of {apart.numel()} differ)"
    )
