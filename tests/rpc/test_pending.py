"""The table of requests on their way: each leaves it exactly once, whatever happens in whichever order."""

import itertools
from collections.abc import Callable

import pytest

from telegrad.rpc.client.pending import FOREVER, Pending, Slot


def slot(timeout: float = 0.0, now: float = 0.0, future: bool = False) -> Slot:
    made = Slot(lambda: "a call", timeout, now + timeout if timeout else FOREVER)
    if future:
        made.complete = lambda _: None
    return made


def admitted(pending: Pending, count: int, **given: object) -> list[Slot]:
    slots = [slot(**given) for _ in range(count)]
    for each in slots:
        pending.admit(each)
    return slots


def test_ids_count_from_one() -> None:
    pending = Pending()
    assert [each.request_id for each in admitted(pending, 3)] == [1, 2, 3]
    assert len(pending) == 3


def test_a_reply_finds_its_request_once() -> None:
    pending = Pending()
    (waiting,) = admitted(pending, 1)
    assert pending.take(1) is waiting
    assert pending.take(1) is None
    assert pending.take(7) is None


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3, 4])))
def test_what_is_acknowledged_was_answered(order: tuple[int, ...]) -> None:
    """`lowest` never passes a request that still waits, in whichever order the replies come."""
    pending = Pending()
    admitted(pending, 4)
    waiting = {1, 2, 3, 4}
    for answered in order:
        pending.take(answered)
        waiting.discard(answered)
        later = slot()
        lowest = pending.admit(later)
        waiting.add(later.request_id)
        assert lowest <= min(waiting)
        assert pending.lowest() <= min(waiting)


# Every event that ends a request, as the shell brings it about.
EVENTS: dict[str, Callable[[Pending], list[Slot]]] = {
    "reply": lambda pending: [taken] if (taken := pending.take(1)) is not None else [],
    "a second reply": lambda pending: [taken] if (taken := pending.take(1)) is not None else [],
    "deadline": lambda pending: pending.expired(10.0)[0],
    "death": lambda pending: pending.take_all(),
}


@pytest.mark.parametrize("order", list(itertools.permutations(EVENTS)))
def test_every_interleaving_ends_a_request_once(order: tuple[str, ...]) -> None:
    pending = Pending()
    (waiting,) = admitted(pending, 1, timeout=5.0, future=True)
    ended = [each for event in order for each in EVENTS[event](pending)]
    assert ended == [waiting]
    assert len(pending) == 0


def test_deadlines_are_minded_for_futures_only() -> None:
    """A caller that waits keeps its own deadline."""
    pending = Pending()
    pending.admit(slot(timeout=1.0))
    future = slot(timeout=2.0, future=True)
    pending.admit(future)
    assert pending.expired(1.5) == ([], 2.0)
    assert pending.expired(2.0) == ([future], FOREVER)
    assert [each.request_id for each in pending.snapshot()] == [1]


def test_a_late_reply_is_told_from_a_second_copy() -> None:
    """A request that is sent again is answered again. Only the reply of one that was given up is news."""
    pending = Pending()
    admitted(pending, 2)
    assert pending.take(1) is not None
    assert not pending.is_late(1)
    assert pending.give_up(2) is not None
    assert pending.give_up(2) is None
    assert pending.is_late(2)
    assert not pending.is_late(2)


def test_one_that_expired_was_given_up() -> None:
    pending = Pending()
    admitted(pending, 1, timeout=1.0, future=True)
    pending.expired(1.0)
    assert pending.is_late(1)


def test_what_was_given_up_is_acknowledged_when_its_reply_has_come() -> None:
    """Until then it can be asked for again, over another connection."""
    pending = Pending()
    admitted(pending, 2)
    pending.give_up(1)
    pending.take(2)
    assert pending.lowest() == 1
    assert pending.overdue() == [1]
    assert pending.is_late(1)
    assert pending.overdue() == []
    assert pending.lowest() == 3
