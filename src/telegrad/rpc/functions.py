"""Decorators for functions that are called from other workers."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from telegrad.rpc.server.run_call import ASYNC_MARK

__all__ = ["async_execution"]

P = ParamSpec("P")
T = TypeVar("T")


def async_execution(fn: Callable[P, torch.futures.Future[T]]) -> Callable[P, T]:
    """Mark a function that returns a Future: the call is answered when the future is done, and no thread waits for it.

    It may be combined with `staticmethod` and `classmethod`, this decorator being the inner one. For a type checker it
    returns what a caller on another worker gets: the value. Called directly it gives the future, as it was written.

    Examples:
        >>> @rpc.functions.async_execution
        ... def ask_back(x):
        ...     return rpc.rpc_async("worker0", torch.add, (x, 1))
        >>> rpc.rpc_sync("worker1", ask_back, (torch.ones(2),))
        tensor([2., 2.])
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it
