"""The future of a call: a `torch.futures.Future` that can be awaited, helps its own reply in, and is not lost silently.

A plain torch future only sleeps in `wait`. This one knows the link its reply will come on, so the waiting thread reads
the reply itself and no other thread has to wake up for it.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

import torch

from telegrad import trace
from telegrad.cuda import order
from telegrad.errors import CallCancelled
from telegrad.rpc.client.outcomes import OWN_END
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.remote_errors import hide_own_frames, without_frames, without_traceback
from telegrad.rpc.threads.yield_turn import blocking

log = logging.getLogger("telegrad.rpc")

T = TypeVar("T")
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """What `rpc_async` returns. Everything `torch.futures.Future` does, and `await`.

    Examples:
        >>> future = rpc.rpc_async("worker1", pow, (2, 3))
        >>> future.then(lambda done: done.wait() + 1).wait()
        9
    """

    # Where the reply will come; dropped at completion. No closure: each object that a call in flight leaves behind is
    # one more for the garbage collector to walk.
    awaited: Slot | None = None
    has_callbacks = False
    settling = False  # whether a thread that must not run callbacks is about to complete it
    _failure: "_Failure | None" = None
    made: "order.Mark | None" = None  # with CUDA tensors: the streams its value was made on

    def __init__(self, *, devices: list[Any] | None = None, what: str = "a call") -> None:
        torch._C.Future.__init__(self, [torch.device(d) for d in devices] if devices else [])
        self.what = what

    @property
    def failed(self) -> bool:
        """Whether an error has been set. Known a moment before the future is done, and so to whoever waited for it."""
        return self._failure is not None

    def wait(self) -> T:
        """The value, when it is there; raises what the call raised."""
        try:
            if not self.done():
                awaited = self.awaited
                if awaited is not None:
                    if trace.recorder is not None:
                        trace.recorder.waited(awaited.wait, awaited)
                    else:
                        awaited.wait()
                if not self.done():
                    with blocking():
                        torch._C.Future.wait(self)
            if self.made is not None:
                order.follow(self.made)
            return cast(T, torch._C.Future.wait(self))
        except BaseException as error:
            hide_own_frames(error)
            raise

    def cancel(self) -> bool:
        """Wait for the call no longer: the future fails with CallCancelled, and the worker is told.

        There, a call that has not begun never begins, a coroutine is cancelled, and a function that runs can ask
        `rpc.cancelled()`. Returns False, and does nothing, if the call is done, or the future is not that of a call.

        Examples:
            >>> future = rpc.rpc_async("worker1", time.sleep, (2,))
            >>> future.cancel()
            True
        """
        awaited = self.awaited
        return awaited is not None and bool(awaited.link.cancel(awaited))

    def value(self) -> T:
        """The value of a future that is done; raises what the call raised."""
        try:
            if self.made is not None:
                order.follow(self.made)
            return cast(T, torch._C.Future.value(self))
        except Exception as error:
            hide_own_frames(error)
            raise

    def set_result(self, result: T) -> None:
        """Complete with a value. CUDA tensors in it are those of this thread's current streams."""
        if order.active:
            self.made = order.mark(result)
        torch._C.Future.set_result(self, result)

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> "Future[S]":
        """A future of what `callback` returns once this one is done."""
        if not callable(callback):
            raise TypeError(f"incompatible function arguments. A callback takes the future, got {callback!r}")
        child: Future[S] = Future(what=f"a callback on {self.what}")

        def run(_: object) -> None:
            try:
                child.set_result(callback(self))
            except Exception as error:
                child.set_exception(_in_callback(error))

        self.add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Run `callback` with this future when it is done; at once if it is.

        It sees the context variables of the code that adds it: calls that it makes are in the autograd context of that
        code, whichever thread runs it."""
        if not callable(callback):
            raise TypeError(f"incompatible function arguments. A callback takes the future, got {callback!r}")
        context = contextvars.copy_context()
        self._add_callback(lambda future: context.run(callback, future))

    def _add_callback(self, callback: Callable[[torch.futures.Future[T]], object]) -> None:
        self.has_callbacks = True
        while self.settling and not self.done():  # a moment: the value is being unpacked
            time.sleep(0)
        if self._failure is not None:
            self._failure.seen = True
        torch._C.Future.add_done_callback(self, lambda _: callback(self))

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override] # wider than torch's on purpose
        """Complete with an error, which `wait` and `value` will raise."""
        if not isinstance(result, BaseException):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        self._failure = failure = _Failure(self.has_callbacks)

        def unwrap(error: BaseException) -> None:
            failure.seen = True
            raise without_traceback(error)

        torch._C.Future._set_unwrap_func(self, unwrap)
        self.awaited = None
        # A traceback holds frames, these hold the future, and it holds the error in C++, where the garbage collector
        # does not look: kept as it is, the error would keep every tensor of those frames; so would what it came from.
        torch._C.Future.set_result(self, without_frames(result))

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        def finished(_: object) -> None:
            # The loop may be gone by the time the reply comes; nobody waits for it then.
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self._add_callback(finished)
        try:
            yield from done.__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        try:
            return self.value()
        except Exception as error:
            hide_own_frames(error)
            raise

    def __del__(self) -> None:
        failure = self.__dict__.get("_failure")
        if failure is not None and not failure.seen:
            try:
                torch._C.Future.wait(self)
            except BaseException as error:
                if isinstance(error, CallCancelled) or str(error).startswith(OWN_END):
                    return  # it was meant to: by `cancel`, or by a shutdown or Ctrl-C that ends the program
                log.warning(
                    "%s failed, and its future was dropped before anyone asked for the result: %s", self.what, error
                )


def _in_callback(error: Exception) -> RuntimeError:
    failure = RuntimeError(f"Got the following error when running the callback: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class _Failure:
    """Whether anybody looked at the error of a failed future."""

    __slots__ = ("seen",)

    def __init__(self, seen: bool) -> None:
        self.seen = seen
