"""Which part of a value cannot be sent. Runs only after packing has failed, so it may take its time."""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Callable, Iterator
from typing import Any

_MAX_DEPTH = 12
_MAX_TEXT = 200

_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (
        (types.GeneratorType, types.AsyncGeneratorType),
        (
            "its state cannot leave the process; send a list of what it yields, or the function that makes it; "
            "rpc.stream gives what one on another worker yields, as it comes"
        ),
    ),
    (types.CoroutineType, "its state cannot leave the process; send the function that makes it"),
    (types.ModuleType, "import it on the worker instead"),
    (io.IOBase, "send its name, or what it contains, and open it on the worker"),
)
METHOD_FOLLOWS = "method_follows"  # what a class has whose objects stand for that of which a method is called
BLAMED = "a value"  # how a text begins, unless it is about an argument
_GLOBAL = "global "
_DEFAULT_ADVICE = "create it on the worker that needs it, or give its class a __reduce__ that leaves it out"


def blame(value: Any, attempt: Callable[[Any], object]) -> str:
    """Name the innermost part of `value` on which `attempt` fails, the way to it, and what to do."""
    path = [f"{value.__qualname__}()" if isinstance(value, types.FunctionType) else BLAMED]
    refused = value
    why = _failure(value, attempt)
    is_call = isinstance(value, tuple) and list(map(type, value[-2:])) == [tuple, dict]
    for depth in range(_MAX_DEPTH):
        parts = _call_parts(*value) if is_call and depth == 0 else _parts(refused)
        failing = ((name, part, _failure(part, attempt)) for name, part in parts)
        found = next((entry for entry in failing if entry[2] is not None), None)
        if found is None:
            break
        name, refused, why = found
        path = [name] if is_call and depth == 0 else [*path, name]
    cls = type(refused)
    advice = next((text for types_, text in _ADVICE if isinstance(refused, types_)), _DEFAULT_ADVICE)
    if any(step.startswith(_GLOBAL) for step in path):
        advice += "; or put the function into a module that both workers import"
    way = ", in its ".join(path)
    return f"{way}: {cls.__module__}.{cls.__qualname__} cannot be sent ({why}); {advice}"


def _failure(part: Any, attempt: Callable[[Any], object]) -> str | None:
    try:
        attempt(part)
    except Exception as error:
        text = str(error) or type(error).__name__
        return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    return None


def _call_parts(*call: Any) -> Iterator[tuple[str, Any]]:
    """Of a call: its function, if that goes along, and its arguments."""
    *function, args, kwargs = call
    if args and getattr(type(args[0]), METHOD_FOLLOWS, False):  # of a method: its name, and its own arguments
        _, _, args, kwargs = args
    for each in function:
        yield f"{getattr(each, '__qualname__', 'the function')}()", each
    for index, argument in enumerate(args):
        yield f"argument {index}", argument
    for name, argument in kwargs.items():
        yield f"argument {name!r}", argument


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, each with a name a reader of the program knows."""
    if isinstance(value, (list, tuple)):
        yield from ((f"item {index}", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"element {item!r}", item) for item in value)
    elif isinstance(value, dict):
        yield from ((f"item {key!r}", item) for key, item in value.items())
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "object", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif not isinstance(value, (type, types.ModuleType)):
        yield from ((f"attribute {name!r}", part) for name, part in getattr(value, "__dict__", {}).items())


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell holds nothing to ask for
            yield f"variable {name!r}", cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{_GLOBAL}{name!r}", function.__globals__[name]
    yield "defaults", function.__defaults__
