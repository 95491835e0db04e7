"""The functions that others may call by name, and by whom; and how much a peer may ask for.

With `RpcBackendOptions(exports_only=True)` these are all that a worker runs for others (`guard.py` holds to it).
"""

import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar, overload

from telegrad.errors import CallRefused, SerializationError
from telegrad.wire.definitions import NAMED

F = TypeVar("F", bound=Callable[..., Any])

_MAX_NAME = 200
MOST_NAME_BYTES = 1 + 4 * _MAX_NAME  # of a definition that is a name


class Export(NamedTuple):
    """A function, its name, and who may call it (None: every worker of the job)."""

    function: Callable[..., Any]
    name: str
    may_call: frozenset[str] | None


class Limits(NamedTuple):
    """What each peer may ask of a worker that runs exported functions alone.

    Attributes:
        calls_per_second: requests of all kinds, over a while; twice as many at once after a pause.
        running: requests that it may have under way at a time.
        references: results it may have this worker keep (`rpc.remote`).
        contexts: autograd contexts it may have open here.
        context_calls: calls it may make in one of them: each is kept for the backward pass.
        kept_bytes: bytes of results that are kept until it has said that they arrived; so many again of arguments of
            its calls that are under way, of its calls in open contexts, and of what its references keep: tensors, each
            storage once, text and bytes, in containers and dataclasses.
        patience: seconds that this worker waits for it to take in an answer.

    Examples:
        >>> limits = rpc.Limits(calls_per_second=100)
    """

    calls_per_second: float = 1000.0
    running: int = 64
    references: int = 256
    contexts: int = 64
    context_calls: int = 4096
    kept_bytes: int = 2**30
    patience: float = 30.0


_exports: dict[str, Export] = {}
_names: dict[Any, str] = {}
_lock = threading.Lock()


@overload
def export(function: F, *, name: str | None = None, may_call: Collection[str] | None = None) -> F: ...
@overload
def export(
    function: None = None, *, name: str | None = None, may_call: Collection[str] | None = None
) -> Callable[[F], F]: ...
def export(function: Any = None, *, name: str | None = None, may_call: Collection[str] | None = None) -> Any:
    """Let other workers call a function by name: `rpc.rpc_sync(worker, "name", args=...)`.

    Args:
        function: anything callable; a bound method keeps its object here.
        name: how others call it; by default the function's own name.
        may_call: names of the workers that may; by default all of the job.

    Also a decorator: `@rpc.export`, `@rpc.export(may_call=["company"])`.

    Examples:
        >>> def double(x):
        ...     return 2 * x
        >>> _ = rpc.export(double, name="double it", may_call=["worker1"])
        >>> rpc.withdraw("double it")
    """
    if function is None:
        return lambda decorated: export(decorated, name=name, may_call=may_call)
    if not callable(function):
        raise TypeError(f"only what can be called can be exported, got {function!r}")
    if isinstance(may_call, str):
        raise TypeError(f"may_call is a list of names, got {may_call!r}; for one worker write [{may_call!r}]")
    name = getattr(function, "__name__", "") if name is None else name
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(f"{name!r} cannot be the name of an exported function")
    with _lock:
        if name in _exports and _exports[name].function != function:
            raise ValueError(f"another function is exported as {name!r}: give each a name of its own")
        _exports[name] = Export(function, name, None if may_call is None else frozenset(may_call))
        _names[function] = name
    return function


def withdraw(name: str) -> None:
    """Export a function no longer. Whoever calls it from now on is refused.

    Examples:
        >>> _ = rpc.export(abs, name="absolute")
        >>> rpc.withdraw("absolute")
    """
    with _lock:
        entry = _exports.pop(name, None)
        if entry is not None:
            _names.pop(entry.function, None)


def exported_name(function: Any) -> str:
    """How to call a function that the other worker has exported; SerializationError if that is not known."""
    if type(function) is str:
        return function
    try:
        name = _names.get(function)
    except TypeError:  # not hashable
        name = None
    if name is None:
        raise SerializationError(
            f"{function!r} cannot be sent, by rule 'exports only': this worker exchanges plain data alone "
            "(exports_only). Give the name under which the other worker has exported it"
        )
    return name


def refuse_where_plain(layers: Any, what: str, instead: str) -> None:
    """Raise CallRefused for what needs functions of Telegrad's own on a worker that runs exported ones alone."""
    if layers.plain:
        raise CallRefused(f"rule 'exports only': {what} runs what was not exported on the other worker; {instead}")


def find_export(definition: bytes, caller: str) -> Export:
    """The exported function that a definition names. CallRefused if there is none, or not for this caller."""
    name = name_in(definition)
    if name is None:
        raise CallRefused("rule 'exports only': a function came by value or by import path; call exported names alone")
    entry = _exports.get(name)
    if entry is None:
        raise CallRefused(
            f"no function is exported as {name!r}: func is text, which names an exported function (`rpc.export`). Pass "
            "the function itself, unless the worker runs exported ones alone (rule 'exports only')"
        )
    if entry.may_call is not None and caller not in entry.may_call:
        raise CallRefused(f"rule 'may_call' of {name!r}: worker {caller!r} may not call it")
    return entry


def name_in(definition: bytes) -> str | None:
    """The name of an exported function that a definition gives; None if it gives the function in another way."""
    if definition[:1] != NAMED or len(definition) > MOST_NAME_BYTES:
        return None
    return definition[1:].decode("utf-8", "replace")


def definition_of(name: str) -> bytes:
    """How a call names an exported function."""
    return NAMED + name.encode()
