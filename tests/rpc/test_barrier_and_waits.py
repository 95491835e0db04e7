"""Barriers and chains of waits, which decide without any worker."""

from types import SimpleNamespace
from typing import Any

from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.job.arrivals import Answer, Arrival, Arrivals
from telegrad.rpc.job.barrier import Barriers
from telegrad.rpc.job.debug_waits import Wait, chains
from telegrad.rpc.workers import Member
from telegrad.wire.messages import Barrier


def came(activity: int, answer: Answer = lambda _: None, incarnation: int = 1) -> Arrival:
    return Arrival(incarnation, activity, answer)


NAMES = {0: "w0", 1: "w1", 2: "w2"}


def test_a_barrier_is_complete_when_all_have_come_and_its_keeper_hears_last() -> None:
    book, heard = Arrivals(), []
    for worker in ("w0", "w2", "w1"):
        assert book.complete(["w0", "w1", "w2"], "w0") == []
        book.arrive("shutdown/0", worker, came(5, lambda total, worker=worker: heard.append((worker, total))))
    for answer, total in book.complete(["w0", "w1", "w2"], "w0"):
        answer(total)
    assert sorted(heard[:2]) == [("w1", 15), ("w2", 15)]
    assert heard[2] == ("w0", 15)
    assert book.waiting() == []


def test_the_dead_are_not_expected() -> None:
    book = Arrivals()
    book.arrive("shutdown/0", "w0", came(1))
    assert book.missing("shutdown/0", ["w0", "w1"]) == ["w1"]
    assert len(book.complete(["w0"], "w0")) == 1


def test_one_that_was_started_again_comes_itself() -> None:
    """It died at the barrier. Its successor has the name, and was answered for by nobody."""
    book, heard = Arrivals(), []
    book.arrive("shutdown/0", "w1", came(3, lambda total: heard.append(("dead", total)), incarnation=7))
    book.lose("w1", 6)  # of the one before: heard of late
    assert book.missing("shutdown/0", ["w0", "w1"]) == ["w0"]
    book.lose("w1", 7)
    assert book.missing("shutdown/0", ["w0", "w1"]) == ["w0", "w1"] and book.waiting() == []
    book.arrive("shutdown/0", "w0", came(1, lambda total: heard.append(("w0", total))))
    assert book.complete(["w0", "w1"], "w0") == []
    book.arrive("shutdown/0", "w1", came(2, lambda total: heard.append(("w1", total)), incarnation=8))
    book.lose("w1", 7)
    for answer, total in book.complete(["w0", "w1"], "w0"):
        answer(total)
    assert heard == [("w1", 3), ("w0", 3)]


def test_word_of_one_that_is_dead_does_not_replace_its_successor() -> None:
    here, before, after = (
        Member(name, WorkerId(rank), Incarnation(incarnation), (), 0)
        for name, rank, incarnation in (("w0", 0, 1), ("w1", 1, 7), ("w1", 1, 8))
    )
    answered: list[Any] = []
    agent: Any = SimpleNamespace(
        directory=SimpleNamespace(look_up=None, members=lambda: [here, after]),
        info=here.info,
        is_dead=before.__eq__,
        reply=lambda request, _: answered.append(request.caller),
    )
    barriers = Barriers(agent)
    serve: Any = barriers.messages()[Barrier].handler
    for caller in (after, before, here):  # that of the dead one was read long ago, by a thread that was kept waiting
        serve(SimpleNamespace(message=Barrier("shutdown/0", caller.name, 1), caller=caller))
    assert answered == [after, here]


def test_whoever_is_a_round_ahead_has_been_here() -> None:
    """A host died after it had answered some. Under the next one they would wait for each other."""
    book, heard = Arrivals(), []
    book.arrive("shutdown/1", "w1", came(4, lambda total: heard.append(("w1", total))))
    book.arrive("shutdown/0", "w2", came(3, lambda total: heard.append(("w2", total))))
    assert book.missing("shutdown/0", ["w1", "w2"]) == []
    assert book.missing("shutdown/1", ["w1", "w2"]) == ["w2"]
    for answer, total in book.complete(["w1", "w2"], "w1"):
        answer(total)
    assert heard == [("w2", 7)]
    book.arrive("shutdown/left", "w2", came(0))
    assert book.missing("shutdown/1", ["w1", "w2"]) == []


def test_rounds_of_other_barriers_do_not_count() -> None:
    book = Arrivals()
    book.arrive("other/5", "w1", came(0))
    assert book.missing("shutdown/0", ["w1"]) == ["w1"]


def test_a_chain_is_followed_to_its_end() -> None:
    answers = {
        0: [Wait("call 17 to w2: f()", 2)],
        2: [Wait("backward of context 5, begun by w0, waits for w1", 1)],
        1: [Wait("serves a PythonCall of w2")],
    }
    assert chains(NAMES, answers, 0) == [
        "w0 call 17 to w2: f()",
        "  w2 backward of context 5, begun by w0, waits for w1",
        "    w1 serves a PythonCall of w2",
    ]


def test_a_circle_is_named() -> None:
    answers = {0: [Wait("call 1 to w1", 1)], 1: [Wait("call 1 to w0", 0)]}
    assert chains(NAMES, answers, 0)[-1] == "    w0 again: they wait for each other"


def test_a_worker_that_waits_for_its_own_arrival_is_no_circle() -> None:
    """It coordinates a barrier to which others have come, and it has not."""
    answers = {0: [Wait("barrier 'shutdown/0', which it coordinates, waits for w0", 0), Wait("call 1 to w1", 1)]}
    assert chains(NAMES, {**answers, 1: [Wait("serves a PythonCall of w0")]}, 0) == [
        "w0 barrier 'shutdown/0', which it coordinates, waits for w0",
        "w0 call 1 to w1",
        "  w1 serves a PythonCall of w0",
    ]


def test_silence_is_told_from_idleness() -> None:
    asked = [Wait("call 1 to w1", 1), Wait("call 2 to w2", 2)]
    lines = chains(NAMES, {0: asked, 1: None, 2: []}, 0)
    assert lines[1] == "  w1 does not answer"
    assert "w2 waits for nothing" in lines[3]
