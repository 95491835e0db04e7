"""The table of programs, and how one is run: in one process, then over workers, and the two compared."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from tests.features import world
from tests.features.world import Outcome

WORKERS = ("worker1", "worker2", "worker3")
VARIANTS = ("plain", "nested", "unused", "retained")


class Entry(NamedTuple):
    """One program. Where it is refused over workers, the error and what its text says."""

    name: str
    run: Callable[[], Any]
    error: type[BaseException] | None = None
    text: str = ""
    variants: tuple[str, ...] = VARIANTS
    strict: bool = False


TABLE: dict[str, Entry] = {}


def add(name: str, run: Callable[[], Any], **options: Any) -> None:
    assert name not in TABLE, f"two programs are called {name!r}"
    TABLE[name] = Entry(name, run, **options)


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    """Put a program into the table."""
    add(run.__name__, run)
    return run


def program_with(**options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Put a program into the table that is special: `variants` in which it makes sense, `strict` for its context."""

    def put(run: Callable[[], Any]) -> Callable[[], Any]:
        add(run.__name__, run, **options)
        return run

    return put


def refused(error: type[BaseException], text: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Put a program into the table that raises `error` over workers, with a text that matches."""
    return program_with(error=error, text=text, variants=("plain",))


def in_one_process(entry: Entry, variant: str) -> Outcome:
    """The oracle."""
    world.begin(distributed=False, variant=variant)
    try:
        loss = _loss(entry.run())
        if loss is not None:
            if variant == "retained":
                loss.backward(retain_graph=True)
            loss.backward()
        return world.outcome(None)
    finally:
        world.no_longer()


def over_workers(entry: Entry, variant: str) -> Outcome:
    """The same over workers."""
    for worker in WORKERS:
        rpc.rpc_sync(worker, world.begin, (True,))
    world.begin(distributed=True, variant=variant)
    try:
        with autograd.context(strict=entry.strict) as context_id:
            loss = _loss(entry.run())
            if loss is not None:
                if variant == "retained":
                    autograd.backward(context_id, [loss], retain_graph=True, timeout=90)
                autograd.backward(context_id, [loss], timeout=90)
            return _gathered(context_id)
    finally:
        world.no_longer()


def _loss(result: Any) -> Tensor | None:
    if result is None:
        return None
    tensors = [result] if isinstance(result, Tensor) else [each for each in result if isinstance(each, Tensor)]
    parts = [each.abs() if each.is_complex() else each for each in tensors if each.requires_grad]
    return sum((part.double().sum() for part in parts), torch.zeros((), dtype=torch.float64))


def _gathered(context_id: int) -> Outcome:
    whole = world.outcome(context_id)
    for worker in WORKERS:
        with _outside():
            there = rpc.rpc_sync(worker, _outcome_there, (context_id,))
        for part, found in there.items():
            again = whole[part].keys() & found.keys()
            assert not again, f"{again} on several workers: names must be unique within a program"
            whole[part] |= found
    return whole


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    from telegrad.autograd.registry import within

    with within(None):
        yield


def _outcome_there(context_id: int) -> Outcome:
    from telegrad.autograd.registry import registry

    registry().join(context_id)
    return world.outcome(context_id)


def check(name: str, variant: str = "plain") -> None:
    """Run one program both ways and compare."""
    entry = TABLE[name]
    if entry.error is not None:
        with pytest.raises(entry.error, match=entry.text):
            over_workers(entry, variant)
        return
    expected = in_one_process(entry, variant)
    found = over_workers(entry, variant)
    assert not found.pop("strays"), "a gradient went to .grad instead of the context"
    del expected["strays"]
    if variant == "retained":  # a post-accumulate hook sees the gradient of its own pass (docs/guarantees.md)
        found["logs"].pop("accumulated", None)
        expected["logs"].pop("accumulated", None)
    for outcome in (found, expected):  # hooks of calls that do not depend on each other fire in any order
        outcome["logs"] = {key: sorted(entries, key=_rounded) for key, entries in outcome["logs"].items()}
    for part, values in expected.items():
        assert found[part].keys() == values.keys(), f"{part}: {found[part].keys()}"
        for key, value in values.items():
            assert_same(found[part][key], value, f"{part} of {key}")
    assert any(expected[part] for part in expected), f"{name} compares nothing"


def _rounded(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_rounded, value))
    return f"{value:.3f}" if isinstance(value, float) else repr(value)


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, float):
        tolerance = 1e-5 * max(1.0, abs(expected))
        close = found == expected or abs(found - expected) <= tolerance or (math.isnan(found) and math.isnan(expected))
        assert close, f"{where}: {found} instead of {expected}"
    elif isinstance(expected, complex):
        assert abs(found - expected) <= 1e-5 * max(1.0, abs(expected)), f"{where}: {found} instead of {expected}"
    elif isinstance(expected, (list, tuple)):
        assert isinstance(found, (list, tuple)) and len(found) == len(expected), f"{where}: {found}, not {expected}"
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, where)
    else:
        assert found == expected, f"{where}: {found} instead of {expected}"
