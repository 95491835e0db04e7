"""Decorators for functions that are called from other workers."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from telegrad.rpc.server.run_call import ASYNC_MARK

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a Future: the call is answered when the future is done, and no thread waits for it.

    It may be combined with `staticmethod` and `classmethod`, this decorator being the inner one.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper  # type: ignore[return-value] # the wrapper has the type of what it wraps
