"""Recording off costs a call one test of a flag in each place that could record; on, a bounded number of bytecodes."""

import dis
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from benchmarks.recording import bytecodes

_PATHS = ("rpc", "autograd", "engine", "optim", "rref", "transport", "wire")


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def modules() -> Iterator[CodeType]:
    for package in _PATHS:
        root = importlib.import_module(f"telegrad.{package}")
        for found in [root.__name__, *(m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}."))]:
            spec = importlib.util.find_spec(found)
            assert spec is not None and spec.origin is not None
            yield compile(Path(spec.origin).read_text(), spec.origin, "exec")


def unguarded(code: CodeType) -> list[str]:
    """Places where the recorder is looked up, that are neither a test for None nor skipped by one."""
    instructions = list(dis.get_instructions(code))
    skipped: list[tuple[int, int]] = []  # ranges that such a test jumps over, if there is no recorder
    found = []
    for index, instruction in enumerate(instructions):
        if instruction.opname != "LOAD_ATTR" or instruction.argval != "recorder":
            continue
        jump = next(i for i in instructions[index + 1 :] if i.opname not in ("CACHE", "COPY", "LOAD_CONST", "IS_OP"))
        if "JUMP" in jump.opname and "NONE" in jump.opname:
            target = int(jump.argval)
            end = instructions[-1].offset + 2
            skipped.append((jump.offset, target) if "NOT" not in jump.opname else (target, end))
        elif not any(begin <= instruction.offset < end for begin, end in skipped):
            found.append(f"{code.co_filename}:{code.co_firstlineno}, {code.co_qualname}")
    return found


def test_each_place_that_records_tests_the_flag_first():
    places = [code for module in modules() for code in codes(module) if "recorder" in code.co_names]
    assert len(places) >= 8, "the path of a call has places that record"
    assert not [place for code in places for place in unguarded(code)]


def test_a_call_that_records_without_a_test_is_found():
    good = compile("if trace.recorder is not None:\n    trace.recorder.answered(slot)\nafter()", "good", "exec")
    bad = compile("trace.recorder.answered(slot)", "bad", "exec")
    assert not unguarded(good)
    assert unguarded(bad)


@pytest.mark.slow
@pytest.mark.long
def test_an_empty_call_executes_a_few_bytecodes_more_while_it_is_recorded():
    found = bytecodes()
    off, on = sum(found["off"]), sum(found["on"])
    assert on - off < 340, found
    assert on < 1.2 * off, found
