"""Things that one thread at a time may use: leaves, whose `.grad` a pass borrows, and nodes, whose order a cut changes.

Passes over the same leaves may run in several threads. A claim has all its things or none, so two claims never wait for
each other. A thread may claim again what it has: a hook may run another pass.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from threading import get_ident

_holders: dict[int, int] = {}  # id of a claimed thing -> thread that has it; changed by single operations alone
_released = threading.Condition()
_waiting: set[int] = set()  # threads that want what another has

Claim = Sequence[int]  # what is to be released


def try_claim(things: Iterable[object]) -> Claim | None:
    """Have all of `things` to this thread, or None if another has any."""
    thread = get_ident()
    keys = [*map(id, things)]
    holders = [*map(_holders.setdefault, keys, repeat(thread))]
    if all(map(is_, holders, repeat(thread))):  # this very object: it was put there now
        return keys
    # What an outer claim of this thread has is its to return.
    claim = [key for key, holder in zip(keys, holders, strict=True) if holder is thread]
    if any(holder != thread for holder in holders):
        release(claim)
        return None
    return claim


def wait_for_claim(things: Iterable[object]) -> Claim:
    """The same, waiting while another has any."""
    wanted = list(things)
    thread = get_ident()
    with _released:
        _waiting.add(thread)  # before looking: who releases from here on will notify
        try:
            while (claim := try_claim(wanted)) is None:
                _released.wait_for(lambda: all(_holders.get(id(thing), thread) == thread for thing in wanted))
        finally:
            _waiting.discard(thread)
    return claim


def release(claim: Claim) -> None:
    """Let others have what was claimed."""
    for key in claim:
        _holders.pop(key, None)  # a thing may be named twice
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
