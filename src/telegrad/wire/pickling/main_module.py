"""Functions of a script or notebook, sent whole to workers that run another program, are functions of one module there.

Each arrives with the global names it uses. All that came from one script share one namespace: what one of them puts in
a global, another finds there. A global belongs to the worker once it has arrived, as if each worker had run the script.
It is replaced only when the script itself has given the name another value: each name travels with a version, which the
script counts. A tensor that requires grad, or what holds one, comes anew with each message, for its gradient has to go
back with that message. Who notices that a global has another value is in `watch.py`.
"""

import builtins
import logging
import secrets
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
from torch import Tensor, nn

log = logging.getLogger("telegrad.rpc")

_HERE = secrets.token_hex(8)  # names the script of this process
_ORIGIN = "__telegrad_origin__"
_ALWAYS = -1  # in place of a version: take the value, whatever was there
_PLAIN = (int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, ModuleType)

_spaces: dict[str, dict[str, Any]] = {}  # by the script they came from
_known: dict[str, dict[str, int]] = {}  # the versions of what is in them
_lock = threading.Lock()  # guards the entering of names into a namespace, with their versions
# Of those that come anew with each message: the object that came last, and how often its tensors had changed in place.
_came: dict[tuple[str, str], tuple[int, list[int]]] = {}
_warned: set[tuple[str, str]] = set()
_counted: dict[str, tuple[Any, int]] = {}  # of the own script: the value that was last sent, and its version


class Gone:
    """In place of the value of a global that has been deleted."""


class _State:
    """Replaced as soon as something has another version, or a value that was counted is no more: until then two values
    of a global with one id are one."""

    now = object()


state = _State()


def own_origin() -> str:
    """The script of this process."""
    return _HERE


def namespace(origin: str) -> dict[str, Any]:
    """The globals of that script, as far as they have come here."""
    if origin == _HERE:
        return vars(sys.modules["__main__"])
    return _spaces.setdefault(origin, {"__name__": "__main__", "__builtins__": builtins, _ORIGIN: origin})


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
    known, version = _last(name)
    if not version or known is not value:
        version += 1
        try:
            _counted[name] = (weakref.ref(value, _changed), version)
        except TypeError:  # of a class that has none
            _counted[name] = (value, version)
        _changed()
    return version


def _last(name: str) -> tuple[Any, int]:
    """The value of a global that was last sent, and its version: 0 if none was."""
    known, version = _counted.get(name, (None, 0))
    if isinstance(known, weakref.ref):
        known = known()
        if known is None:
            known = _counted  # which is no value of any global
    return known, version


def _changed(_: Any = None) -> None:
    state.now = object()


def with_gone(origin: str, used: Iterable[str], names: dict[str, Any]) -> dict[str, Any]:
    """The globals of a function, and those it uses that were sent once and are deleted since."""
    gone = [name for name in used if name not in names and version_of(origin, name, Gone) != 0]
    return {**names, **dict.fromkeys(gone, Gone)} if gone else names


def version_of(origin: str, name: str, value: Any) -> int | None:
    """The version of a global if that was counted already; 0 for one that has never been sent, and is not there."""
    if origin != _HERE:
        return _known.get(origin, {}).get(name, 0)
    known, version = _last(name)
    if version and known is value:
        return version
    return 0 if value is Gone and not version else None


def function_of(origin: str, code: CodeType, closure: Any) -> FunctionType:
    """A function of that script; the rest of it follows with `finish_function`."""
    return FunctionType(code, namespace(origin), None, None, closure)


def finish_function(function: FunctionType, state: Any) -> None:
    """Give a function its state, and its script's namespace the globals that are new."""
    rest, arrived, versions = state
    names = function.__globals__
    _enter(names.get(_ORIGIN), names, arrived, versions)
    cloudpickle.cloudpickle._function_setstate(function, rest)


def renew(origin: str, arrived: dict[str, Any], versions: dict[str, int]) -> None:
    """Give a script's namespace the globals that have changed in the script."""
    if origin != _HERE:
        _enter(origin, namespace(origin), arrived, versions)


def _enter(origin: str | None, names: dict[str, Any], arrived: dict[str, Any], versions: dict[str, int]) -> None:
    before = []  # let go of when the lock is free: they may have something to do at their end
    anew = []
    with _lock:
        known = _known.setdefault(origin, {}) if origin is not None else {}
        for name, value in arrived.items():
            version = versions[name] if origin is not None else 0  # what comes home finds its own globals
            last = known.get(name, 0)
            if version == _ALWAYS or version > last or (name not in names and version == last):
                before.append(names.get(name))
                if version == _ALWAYS:
                    anew.append((name, names.get(name, value), value))
                known[name] = version
                if value is Gone:
                    names.pop(name, None)
                else:
                    names[name] = value
    if before and origin is not None:
        _changed()
        for name, last_value, value in anew:
            _look_at((origin, name), last_value, value)


def _look_at(key: tuple[str, str], before: Any, value: Any) -> None:
    """Another value takes the place of a global that may carry gradients: whether this worker had changed it."""
    if before is not value and key in _came and _came[key] != _state_of(before) and key not in _warned:
        _warned.add(key)
        log.warning(
            "global %r of the script was changed by this worker, and the script's own takes its place with each call "
            "of a function that uses it: it requires grad, and its gradients go back to the script. What a worker is "
            "to train or to count, make there, by rpc.remote or RemoteModule, or in a module that both import",
            key[1],
        )
    _came[key] = _state_of(value)


def _state_of(value: Any) -> tuple[int, list[int]]:
    return id(value), [tensor._version for tensor in _tensors_in(value) if not tensor.is_inference()]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Those that `_may_carry_gradients` has looked at, and the buffers beside them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif not isinstance(value, _PLAIN):
        for item in getattr(value, "__dict__", {}).values():
            if isinstance(item, (Tensor, nn.Module)):
                yield from _tensors_in(item)


def keep_class(cls: type, state: Any) -> None:
    """Give a class its state if it has just been made: to one that was here already this worker may have done much."""
    if not vars(cls).keys() >= state[0].keys():
        cloudpickle.cloudpickle._class_setstate(cls, state)
