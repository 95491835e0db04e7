"""Stands in for `torch.futures.collect_all` and `wait_all`, which end with the first error among calls.

torch's own look for errors below Python, where a call of torch's leaves them and no Python code can. Futures that are
not Telegrad's are left to them.
"""

import threading
from typing import Any

import torch

from telegrad.rpc.futures import Future

__all__ = ["collect_all", "wait_all"]

_torch_collect_all = torch.futures.collect_all


def collect_all(futures: list[torch.futures.Future[Any]]) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
    """A future of all these futures, done when they are, or with the first error of a call among them."""
    futures = list(futures)
    if not any(isinstance(future, Future) for future in futures):
        return _torch_collect_all(futures)
    collected: Future[list[torch.futures.Future[Any]]] = Future(what=f"{len(futures)} calls")
    left = _Countdown(len(futures))

    def note(future: torch.futures.Future[Any]) -> None:
        failure = _failure_of(future) if isinstance(future, Future) else None
        if failure is not None:
            if left.end():
                collected.set_exception(failure)
        elif left.step():
            collected.set_result(futures)

    for future in futures:
        future.add_done_callback(note)
    return collected


def wait_all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all these futures; raises the first error as soon as it is known."""
    return [future.wait() for future in collect_all(futures).wait()]


def _failure_of(future: Future[Any]) -> BaseException | None:
    try:
        future.value()
    except BaseException as error:
        return error
    return None


class _Countdown:
    """Counts to its end, which comes once: by the last step, or before."""

    def __init__(self, steps: int) -> None:
        self._lock = threading.Lock()
        self._left = steps

    def step(self) -> bool:
        """One less; True if it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def end(self) -> bool:
        """Stop counting; True if it had not ended before."""
        with self._lock:
            ended, self._left = self._left <= 0, 0
            return not ended
