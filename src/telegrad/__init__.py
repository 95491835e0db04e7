"""Telegrad: distributed autograd over RPC for PyTorch.

    import telegrad
    from telegrad import autograd, rpc

Parts are loaded when they are first used, so that `import telegrad` is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from telegrad._requirements import check_requirements

if TYPE_CHECKING:
    from telegrad import autograd, compat, durable, errors, nn, observe, optim, rpc, testing
    from telegrad.launch import local_cluster

__version__ = "0.1.0.dev0"  # pyproject.toml reads it here

__all__ = ["autograd", "compat", "durable", "errors", "local_cluster", "nn", "observe", "optim", "rpc", "testing"]

_NAMES = {"local_cluster": "telegrad.launch"}

check_requirements()


if not TYPE_CHECKING:  # to a checker every name would exist then

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            return getattr(importlib.import_module(_NAMES[name]), name)
        if name in __all__:
            return importlib.import_module(f"telegrad.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
