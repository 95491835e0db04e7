"""Calls that their caller no longer waits for: cancelled by it, past their timeout, or interrupted.

A call that has not begun never begins. A coroutine is cancelled, as asyncio cancels a task. A function that runs in a
thread cannot be stopped from outside, but it can ask: `rpc.cancelled()`. In each case the request is answered, with
`CallCancelled` if nothing else, since both sides keep account of every request until it is.
"""

import threading
from collections.abc import Callable

from telegrad.errors import CallCancelled
from telegrad.rpc.threads.yield_turn import local


class Cancellations:
    """What was cancelled of one caller's requests, by their ids. Each change is one operation: no lock is needed."""

    __slots__ = ("_asked", "_stops")

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._stops: dict[int, Callable[[], object]] = {}  # of requests that can be stopped: coroutines

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._asked

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, request_id: int) -> None:
        """The caller no longer waits for this request, which is running here, or about to. Once: a coroutine that is
        cancelled twice could not clean up."""
        if request_id in self._asked:
            return
        self._asked.add(request_id)
        stop = self._stops.get(request_id)
        if stop is not None:
            stop()

    def on_ask(self, request_id: int, stop: Callable[[], object]) -> None:
        """Call `stop` if this request is cancelled; at once if it was."""
        self._stops[request_id] = stop
        if request_id in self._asked:
            stop()

    def forget(self, request_id: int) -> None:
        """The request has been answered."""
        self._asked.discard(request_id)
        self._stops.pop(request_id, None)

    def check(self, request_id: int) -> None:
        """Raise CallCancelled if this request was cancelled before it began."""
        if request_id in self._asked:
            raise CallCancelled("the call was cancelled, or its timeout passed, before it began; it was not run")


class FirstEnd:
    """Of the ways in which a request may end, the first is taken: its result comes, or nobody waits for it any more."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken = threading.Lock()  # held from the first on

    def __call__(self, end: Callable[..., None]) -> Callable[..., None]:
        """`end`, which does nothing unless it comes first."""

        def end_first(*args: object) -> None:
            if self._taken.acquire(blocking=False):
                end(*args)

        return end_first


def cancelled() -> bool:
    """Whether the caller of the function that runs here no longer waits for it, or has died: a long one may ask, and
    stop.

    False outside a function called by another worker, and in threads that such a function starts. A coroutine need not
    ask: it is cancelled.

    Examples:
        >>> def search(candidates):
        ...     for candidate in candidates:
        ...         if rpc.cancelled():
        ...             return None
    """
    turn = local.turn
    return turn is not None and turn.is_cancelled()
