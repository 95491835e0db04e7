"""Telegrad: distributed autograd over RPC for PyTorch."""

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = ("autograd", "compat", "durable", "errors", "nn", "optim", "rpc", "testing")
_NAMES = {"local_cluster": "telegrad.launch"}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"telegrad.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
