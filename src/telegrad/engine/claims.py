"""Things that one thread at a time may use: leaves, whose `.grad` a pass borrows, and nodes, whose order a cut changes.

Passes over the same leaves may run in several threads. A claim has all its things or none, so two claims never wait for
each other. A thread may claim again what it has: a hook may run another pass.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec


class Claim(msgspec.Struct, eq=False):
    """What a thread has to itself until `release`."""

    thread: int
    keys: list[int] = []


_holders: dict[int, Claim] = {}  # by the id of a claimed thing; changed by single operations of the dict alone
_released = threading.Condition()
_waiting: set[int] = set()  # threads that want what another has


def try_claim(things: Iterable[object]) -> Claim | None:
    """Have all of `things` to this thread, or None if another has any."""
    claim = Claim(threading.get_ident())
    if _took_all(claim, things):
        return claim
    release(claim)
    return None


def _took_all(claim: Claim, things: Iterable[object]) -> bool:
    for thing in things:
        key = id(thing)
        holder = _holders.setdefault(key, claim)
        if holder is claim:
            claim.keys.append(key)
        elif holder.thread != claim.thread:  # what an outer claim of this thread has is its to return
            return False
    return True


def wait_for_claim(things: Iterable[object]) -> Claim:
    """The same, waiting while another has any."""
    wanted = list(things)
    claim = Claim(threading.get_ident())
    with _released:
        _waiting.add(claim.thread)  # before looking: who releases from here on will notify
        try:
            while not _took_all(claim, wanted):
                _let_go(claim)  # nobody else who waits has seen that it was taken
                _released.wait()
        finally:
            _waiting.discard(claim.thread)
    return claim


def _let_go(claim: Claim) -> None:
    for key in claim.keys:
        _holders.pop(key, None)  # a thing may be named twice
    claim.keys.clear()


def release(claim: Claim) -> None:
    """Let others have what was claimed."""
    _let_go(claim)
    if _waiting:
        with _released:
            _released.notify_all()


@contextmanager
def claimed(things: Iterable[object]) -> Iterator[None]:
    """`wait_for_claim` for the length of a block."""
    claim = wait_for_claim(things)
    try:
        yield
    finally:
        release(claim)
