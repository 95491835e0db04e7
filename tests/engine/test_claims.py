"""Who has which leaves: all that a claim names, or none of it."""

import threading

from telegrad.engine.local import claims
from telegrad.engine.local.claims import release, try_claim, wait_for_claim

A, B, C = object(), object(), object()


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
        release(wait_for_claim([B, A]))
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
            claim = try_claim(things) or wait_for_claim(things)
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
