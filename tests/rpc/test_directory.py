"""Who counts when several records speak of one worker: what was known, what comes, and what is known then."""

import msgspec
import pytest

from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.workers import Directory, Member


def record(name: str, worker_id: int, generation: int, draw: int = 1, **more: bool) -> Member:
    """A record of the worker `name` that was started `generation` times before."""
    return Member(name, WorkerId(worker_id), Incarnation(draw << 10 | generation), (), 0, **more)


OLD, NEW = record("w", 1, 0), record("w", 1, 1)
OTHER_DRAW = record("w", 1, 0, draw=2)
MOVED = record("w", 4, 0, draw=3)
LEFT = msgspec.structs.replace(OLD, leaving=True)
TOLD_OLD, TOLD_NEW, TOLD_MOVED = (msgspec.structs.replace(m, relayed=True) for m in (OLD, NEW, MOVED))

CASES = {
    "a newcomer": ([], OLD, OLD, []),
    "the same again": ([OLD], OLD, OLD, []),
    "a restart": ([OLD], NEW, NEW, [OLD]),
    "the old one after its restart": ([NEW], OLD, NEW, []),
    "one that had not counted its predecessor": ([OLD], OTHER_DRAW, OLD, []),
    "leaving": ([OLD], LEFT, None, [OLD]),
    "an old one leaving": ([OLD, NEW], LEFT, NEW, []),
    "one that left, repeated by another": ([OLD, LEFT], TOLD_OLD, None, []),
    "back under another id": ([OLD], MOVED, MOVED, [OLD]),
    "relayed, of a stranger": ([], TOLD_OLD, TOLD_OLD, []),
    "relayed, of a restart": ([OLD], TOLD_NEW, OLD, []),
    "relayed, against a namesake's own word": ([OLD], TOLD_MOVED, OLD, []),
    "a namesake's own word against a relayed one": ([TOLD_OLD], MOVED, MOVED, [TOLD_OLD]),
}


@pytest.mark.parametrize("case", CASES)
def test_who_counts(case: str) -> None:
    known, comes, then, gone = CASES[case]
    directory = Directory()
    directory.update(known)
    assert directory.update([comes]) == gone
    assert directory.by_name("w") == then
    assert directory.members() == ([] if then is None else [then])


def test_the_last_incarnation_of_each_id_stays_known() -> None:
    directory = Directory()
    directory.update([OLD, NEW, record("x", 2, 5), LEFT, msgspec.structs.replace(NEW, leaving=True)])
    assert directory.latest() == {1: NEW.incarnation, 2: record("x", 2, 5).incarnation}


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(msgspec.structs.replace(OLD, secret=b"hidden"))
