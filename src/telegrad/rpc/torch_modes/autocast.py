"""Autocast belongs to a thread, so a called function does not see its caller's. `with_autocast` takes it along."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
State = tuple[tuple[str, bool, torch.dtype], ...]  # for each kind of device: whether it is on, and to which dtype


def with_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """`function` to be called elsewhere under the autocast state that is in force here, now.

    `rpc_sync("worker1", with_autocast(layer), (x,))`. The backward of what ran under autocast needs nothing: the casts
    are part of the graph.

    Examples:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     rpc.rpc_sync("worker1", rpc.with_autocast(torch.mm), (x, x)).dtype
        torch.bfloat16
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"autocast does not follow a coroutine, which shares its thread with others: use torch.autocast inside "
            f"{function.__qualname__} instead"
        )
    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    state = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return functools.partial(_run, state, function)


def _run(state: State, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in state:
            if enabled != torch.is_autocast_enabled(kind) or (enabled and dtype != torch.get_autocast_dtype(kind)):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return function(*args, **kwargs)
