"""A creation on its way: the call of `remote` until its owner has run it, or its time is up.

When the time is up the handle is of no more use here, but the reply still counts: it tells that the owner has the fork.
"""

import time
from functools import partial
from typing import Any

from telegrad.errors import RpcTimeout
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.function_table import name_of
from telegrad.rpc.futures import Future
from telegrad.rpc.remote_errors import without_traceback
from telegrad.rpc.workers import Member
from telegrad.rref.outcome import Outcome


class Creation:
    """What became of one call of `remote`."""

    __slots__ = ("__weakref__", "_deadlines", "_func", "_keep", "_to", "deadline", "outcome", "timeout")

    def __init__(self, deadlines: "Deadlines", to: Member, func: Any, timeout: float, keep: Any) -> None:
        self._deadlines = deadlines
        self._to = to
        self._func = func
        self._keep = keep
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.outcome = Outcome()

    def start_timeout(self) -> None:
        """From now on the creation fails at its deadline."""
        if self.timeout > 0 and not self.outcome.done:
            self._deadlines.add(self)

    def done(self) -> None:
        """The owner has run the call."""
        self._keep = None
        self.outcome.set(None)

    def failed(self, error: Exception) -> None:
        """The owner will not run the call."""
        self._keep = None
        self.outcome.fail(partial(without_traceback, error.with_traceback(None)))  # its frames hold references, too

    def expired(self) -> None:
        """The time is up."""
        self.outcome.fail(self._timeout_error)

    def kind(self) -> str:
        """What the value is, in words, as far as the call tells."""
        if self.outcome.failure is not None:
            return "could not be made"
        return str(self._func.__name__) if isinstance(self._func, type) else f"made by {name_of(self._func)}()"

    def error(self) -> BaseException:
        """The error of a creation that failed."""
        assert self.outcome.failure is not None
        return self.outcome.failure()

    def check(self) -> None:
        """Raise if the creation is known to have failed."""
        if self.outcome.failure is not None:
            raise self.error()

    def future(self) -> Future[None]:
        """A future that is done when the owner has run the call."""
        future: Future[None] = Future(what=f"RRef creation by {name_of(self._func)}()")

        def finish() -> None:
            if self.outcome.failure is None:
                future.set_result(None)
            else:
                future.set_exception(self.error())

        self.outcome.when_done(finish)
        return future

    def _timeout_error(self) -> RpcTimeout:
        return RpcTimeout(
            f"RPC ran for more than set timeout ({round(self.timeout * 1000)} ms) and will now be marked with an "
            f"error: RRef creation via rpc.remote({name_of(self._func)}) to worker {self._to.name!r} timed out, and "
            "the value may never exist there. Pass a longer `timeout` if that is expected"
        )


class Deadlines:
    """Watches the deadlines of creations with one entry at the timer, the earliest."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._open: dict[int, Creation] = {}
        self._next = float("inf")

    def add(self, creation: Creation) -> None:
        """Watch one more."""
        key = id(creation)
        self._open[key] = creation
        creation.outcome.when_done(partial(self._forget, key))
        if creation.deadline < self._next:
            self._next = creation.deadline
            self._agent.timer.at(creation.deadline, self._look)

    def _forget(self, key: int) -> None:
        self._open.pop(key, None)

    def __len__(self) -> int:
        """How many creations are not done."""
        return len(self._open)

    def _look(self) -> None:
        now, self._next = time.monotonic(), float("inf")
        for creation in list(self._open.values()):
            if creation.deadline <= now:
                self._agent.io_threads.submit(creation.expired)
            elif creation.deadline < self._next:
                self._next = creation.deadline
        if self._next < float("inf"):
            self._agent.timer.at(self._next, self._look)
