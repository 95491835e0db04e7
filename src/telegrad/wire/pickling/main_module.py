"""Functions of a script or notebook, sent whole to workers that run another program, are functions of one module there.

Each arrives with the global names it uses. All that came from one script share one namespace: what one of them puts in
a global, another finds there. A global belongs to the worker once it has arrived, as if each worker had run the script.
It is replaced only when the script itself has given the name another value: each name travels with a version, which the
script counts. A tensor that requires grad, or what holds one, comes anew with each message, for its gradient has to go
back with that message.
"""

import builtins
import secrets
import sys
import weakref
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
from torch import Tensor, nn

_HERE = secrets.token_hex(8)  # names the script of this process
_ORIGIN = "__telegrad_origin__"
_ALWAYS = -1  # in place of a version: take the value, whatever was there
_PLAIN = (int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, ModuleType)

_spaces: dict[str, dict[str, Any]] = {}  # by the script they came from
_known: dict[str, dict[str, int]] = {}  # the versions of what is in them
_counted: dict[str, tuple[Any, int]] = {}  # of the own script: the value that was last sent, and its version


def origin_of(function: FunctionType) -> str | None:
    """The script whose function this is; None for a function of anything else."""
    names = function.__globals__
    found: str | None = names.get(_ORIGIN)
    if found is None and names is vars(sys.modules["__main__"]):
        return _HERE
    return found


def versions_of(origin: str, names: dict[str, Any]) -> dict[str, int]:
    """The version of each global that a function of that script takes along."""
    versions = {}
    for name, value in names.items():
        if _may_carry_gradients(value):
            versions[name] = _ALWAYS
        else:
            versions[name] = _count(name, value) if origin == _HERE else _known[origin].get(name, 0)
    return versions


def _may_carry_gradients(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, nn.Module):
        return any(param.requires_grad for param in value.parameters())
    if isinstance(value, (list, tuple, set)):
        return any(map(_may_carry_gradients, value))
    if isinstance(value, dict):
        return any(map(_may_carry_gradients, value.values()))
    return any(map(_is_trained, getattr(value, "__dict__", {}).values()))


def _is_trained(value: Any) -> bool:
    return isinstance(value, (Tensor, nn.Module)) and _may_carry_gradients(value)


def _count(name: str, value: Any) -> int:
    known, version = _counted.get(name, (None, 0))
    if isinstance(known, weakref.ref):
        known = known()
    if not version or known is not value:
        version += 1
        try:
            _counted[name] = (weakref.ref(value), version)
        except TypeError:  # of a class that has none
            _counted[name] = (value, version)
    return version


def function_of(origin: str, code: CodeType, closure: Any) -> FunctionType:
    """A function of that script; the rest of it follows with `finish_function`."""
    if origin == _HERE:
        names = vars(sys.modules["__main__"])
    else:
        names = _spaces.setdefault(origin, {"__name__": "__main__", "__builtins__": builtins, _ORIGIN: origin})
    return FunctionType(code, names, None, None, closure)


def finish_function(function: FunctionType, state: Any) -> None:
    """Give a function its state, and its script's namespace the globals that are new."""
    rest, arrived, versions = state
    names = function.__globals__
    origin = names.get(_ORIGIN)
    known = _known.setdefault(origin, {}) if origin is not None else {}
    for name, value in arrived.items():
        version = versions[name] if origin is not None else 0  # what comes home finds its own globals
        if version == _ALWAYS or name not in names or version > known.get(name, 0):
            names[name] = value
            known[name] = version
    cloudpickle.cloudpickle._function_setstate(function, rest)
