"""Barriers and chains of waits, which decide without any worker."""

from telegrad.rpc.job.arrivals import Arrivals
from telegrad.rpc.job.debug_waits import Wait, chains

NAMES = {0: "w0", 1: "w1", 2: "w2"}


def test_a_barrier_is_complete_when_all_have_come_and_its_keeper_hears_last() -> None:
    book, heard = Arrivals(), []
    for worker in ("w0", "w2", "w1"):
        assert book.complete(["w0", "w1", "w2"], "w0") == []
        book.arrive("shutdown/0", worker, 5, lambda total, worker=worker: heard.append((worker, total)))
    for answer, total in book.complete(["w0", "w1", "w2"], "w0"):
        answer(total)
    assert sorted(heard[:2]) == [("w1", 15), ("w2", 15)]
    assert heard[2] == ("w0", 15)
    assert book.waiting() == []


def test_the_dead_are_not_expected() -> None:
    book = Arrivals()
    book.arrive("shutdown/0", "w0", 1, lambda _: None)
    assert book.missing("shutdown/0", ["w0", "w1"]) == ["w1"]
    assert len(book.complete(["w0"], "w0")) == 1


def test_whoever_is_a_round_ahead_has_been_here() -> None:
    """A host died after it had answered some. Under the next one they would wait for each other."""
    book, heard = Arrivals(), []
    book.arrive("shutdown/1", "w1", 4, lambda total: heard.append(("w1", total)))
    book.arrive("shutdown/0", "w2", 3, lambda total: heard.append(("w2", total)))
    assert book.missing("shutdown/0", ["w1", "w2"]) == []
    assert book.missing("shutdown/1", ["w1", "w2"]) == ["w2"]
    for answer, total in book.complete(["w1", "w2"], "w1"):
        answer(total)
    assert heard == [("w2", 7)]
    book.arrive("shutdown/left", "w2", 0, lambda _: None)
    assert book.missing("shutdown/1", ["w1", "w2"]) == []


def test_rounds_of_other_barriers_do_not_count() -> None:
    book = Arrivals()
    book.arrive("other/5", "w1", 0, lambda _: None)
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


def test_silence_is_told_from_idleness() -> None:
    asked = [Wait("call 1 to w1", 1), Wait("call 2 to w2", 2)]
    lines = chains(NAMES, {0: asked, 1: None, 2: []}, 0)
    assert lines[1] == "  w1 does not answer"
    assert "w2 waits for nothing" in lines[3]
