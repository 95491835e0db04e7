"""Things that one thread at a time may use: leaves, whose `.grad` a pass borrows, and nodes, whose order a cut changes.

Passes over the same leaves may run in several threads. A claim takes all its things at once, so two claims never wait
for each other. A thread may claim again what it has: a hook may run another pass.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_changed = threading.Condition()
_claimant: dict[int, int] = {}  # id of a claimed thing -> thread that has it
_waiting: set[int] = set()  # threads that want what another has

Claim = Sequence[int]  # what is to be released


def try_claim(things: Iterable[object]) -> Claim | None:
    """Have all of `things` to this thread, or None if another has any."""
    keys = [id(thing) for thing in things]
    thread = threading.get_ident()
    with _changed:
        return _take(keys, thread)


def _take(keys: list[int], thread: int) -> Claim | None:
    if _claimant:
        if any(_claimant.get(key, thread) != thread for key in keys):
            return None
        keys = [key for key in keys if key not in _claimant]  # what an outer claim of this thread has is its to return
    for key in keys:
        _claimant[key] = thread
    return keys


def wait_for_claim(things: Iterable[object]) -> Claim:
    """The same, waiting while another has any."""
    keys = [id(thing) for thing in things]
    thread = threading.get_ident()
    with _changed:
        while (claim := _take(keys, thread)) is None:
            _waiting.add(thread)
            try:
                _changed.wait()
            finally:
                _waiting.discard(thread)
    return claim


def release(claim: Claim) -> None:
    """Let others have what was claimed."""
    with _changed:
        for key in claim:
            _claimant.pop(key, None)  # a thing may be named twice
        if _waiting:
            _changed.notify_all()


@contextmanager
def claimed(things: Iterable[object]) -> Iterator[None]:
    """`wait_for_claim` for the length of a block."""
    claim = wait_for_claim(things)
    try:
        yield
    finally:
        release(claim)
