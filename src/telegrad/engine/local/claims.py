"""Things that one thread at a time may use: leaves, whose `.grad` a pass borrows, and nodes, whose order a cut changes.

Passes over the same leaves may run in several threads. A claim has all its things or none, so two claims never wait for
each other. A thread may claim again what it has: a hook may run another pass.

Whoever has a leaf may keep it for long, since hooks of the user run meanwhile. So who waits looks now and then whether
it still should: it is told whom it waits for, and may stop.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from threading import get_ident

from telegrad.errors import CallCancelled
from telegrad.rpc.server.cancellation import cancelled
from telegrad.rpc.threads.interrupts import interruptible
from telegrad.rpc.threads.yield_turn import blocking

_LOOK_SECONDS = 0.1  # between two looks whether to go on waiting

_holders: dict[int, int] = {}  # id of a claimed thing -> thread that has it; changed by single operations alone
_released = threading.Condition()
_waiting: set[int] = set()  # threads that want what another has

Claim = Sequence[int]  # what is to be released
WaitOn = Callable[[str], object]  # given who has it, in words; raises to stop waiting


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


def while_wanted(busy: str) -> None:
    """The `WaitOn` of a call: it stops when its caller no longer waits for it, or has died."""
    if cancelled():
        raise CallCancelled(
            f"the call was cancelled, or its timeout passed, while {busy} worked on leaves that it needs"
        )


def wait_for_claim(things: Sequence[object], wait_on: WaitOn = while_wanted) -> Claim:
    """The same, waiting while another has any, as long as `wait_on` lets it."""
    claim = try_claim(things)
    while claim is None:
        with blocking():
            claim = await_claim(things, _LOOK_SECONDS)
        if claim is None and (busy := _who_has(things)):
            wait_on(busy)
    return claim


def await_claim(things: Sequence[object], seconds: float) -> Claim | None:
    """The same, waiting so long at most while another has any."""
    thread = get_ident()
    ends_at = time.monotonic() + seconds

    def are_free() -> bool:
        return all(_holders.get(id(thing), thread) == thread for thing in things)

    with _released:
        _waiting.add(thread)  # before looking: who releases from here on will notify
        try:
            while (claim := try_claim(things)) is None:
                if not _sleep(are_free, ends_at - time.monotonic()):
                    break
        finally:
            _waiting.discard(thread)
    return claim


@interruptible
def _sleep(are_free: Callable[[], bool], seconds: float) -> bool:
    return _released.wait_for(are_free, seconds)


def _who_has(things: Iterable[object]) -> str:
    """The other thread that has any of these, in words; none has them any more: an empty text."""
    holders = {_holders.get(id(thing)) for thing in things} - {None, get_ident()}
    names = [thread.name for thread in threading.enumerate() if thread.ident in holders]
    return f"thread {names[0]!r}" if names else "another thread" if holders else ""


def release(claim: Claim) -> None:
    """Let others have what was claimed."""
    for key in claim:
        _holders.pop(key, None)  # a thing may be named twice
    if _waiting:
        with _released:
            _released.notify_all()


@contextmanager
def claimed(things: Iterable[object], wait_on: WaitOn = while_wanted) -> Iterator[None]:
    """`wait_for_claim` for the length of a block."""
    claim = wait_for_claim([*things], wait_on)
    try:
        yield
    finally:
        release(claim)
