"""Who has which leaves: all that a claim names, or none of it."""

import threading

import pytest

from telegrad.engine.local import claims
from telegrad.engine.local.claims import await_claim, release, try_claim, wait_for_claim

A, B, C = object(), object(), object()


def wait_on(busy: str) -> None:
    pass


def elsewhere(*things: object) -> bool:
    """Whether another thread gets them; it lets go of them again."""
    got: list[bool] = []

    def claim() -> None:
        claimed = try_claim(things)
        got.append(claimed is not None)
        release(claimed or ())

    thread = threading.Thread(target=claim)
    thread.start()
    thread.join()
    return got[0]


def test_a_claim_has_all_or_nothing() -> None:
    held = try_claim([A, B])
    assert held is not None
    assert not elsewhere(B) and not elsewhere(C, A) and not elsewhere(A, C)
    assert elsewhere(C), "what was asked for in vain was let go of"
    assert not elsewhere(A, B), "and what was held was not"
    release(held)
    assert elsewhere(A, B, C) and not claims._holders


def test_a_thread_claims_again_what_it_has_and_returns_it_once() -> None:
    outer = try_claim([A])
    inner = try_claim([A, B])
    assert outer is not None and inner is not None
    release(inner)
    assert elsewhere(B) and not elsewhere(A)
    release(outer)
    assert elsewhere(A) and not claims._holders


def test_a_thing_may_be_named_twice() -> None:
    held = try_claim(iter([A, B, A]))
    assert held is not None and not elsewhere(A)
    release(held)
    assert elsewhere(A, B) and not claims._holders


def test_who_waits_gets_it_in_the_end() -> None:
    held = try_claim([A])
    got = threading.Event()

    def wait() -> None:
        release(wait_for_claim([B, A], wait_on))
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.01)
    release(held or ())
    thread.join()
    assert got.is_set() and not claims._holders


def test_many_threads_that_want_the_same_in_any_order() -> None:
    inside: list[int] = []
    wrong: list[object] = []

    def work(number: int) -> None:
        things = [A, B, C]
        things = things[number % 3 :] + things[: number % 3]
        for _ in range(200):
            claim = try_claim(things) or wait_for_claim(things, wait_on)
            inside.append(number)
            if len(inside) > 1:
                wrong.append([*inside])
            inside.pop()
            release(claim)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not claims._holders


def test_who_waits_a_moment_gets_it_or_nothing() -> None:
    held = try_claim([A])
    found: list[object] = []

    def wait(seconds: float) -> None:
        claim = await_claim([B, A], seconds)
        found.append(claim)
        release(claim or ())

    thread = threading.Thread(target=wait, args=(0.001,))
    thread.start()
    thread.join()
    assert found == [None] and elsewhere(B) and not claims._waiting
    thread = threading.Thread(target=wait, args=(60.0,))
    thread.start()
    release(held or ())
    thread.join()
    assert found[1] is not None and not claims._holders and not claims._waiting


def test_who_waits_is_told_who_has_it_and_may_stop() -> None:
    held = try_claim([A])
    heard: list[str] = []

    def stop(busy: str) -> None:
        heard.append(busy)
        raise TimeoutError

    def wait() -> None:
        with pytest.raises(TimeoutError):
            wait_for_claim([B, A], stop)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert heard == [f"thread {threading.current_thread().name!r}"]
    assert elsewhere(B) and not claims._waiting
    release(held or ())
    assert elsewhere(A) and not claims._holders
