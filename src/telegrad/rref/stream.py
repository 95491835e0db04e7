"""`stream`: the values that a generator on another worker yields, as they come, with backpressure.

The generator lives on the other worker, behind a reference. One call asks for each value, and at most `ahead` of them
are under way, so the generator never runs further ahead of its reader than that. When the reader stops, by `break`, an
error or `close`, the generator is closed, as a local one would be.
"""

import asyncio
import contextlib
import inspect
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from telegrad.rpc.calls import Worker, check_call
from telegrad.rpc.client.function_table import name_of
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rpc.options import UNSET_RPC_TIMEOUT
from telegrad.rpc.remote_errors import hide_own_frames
from telegrad.rpc.trust.exports import refuse_where_plain
from telegrad.rref.rref import RRef, remote

T = TypeVar("T")

_END = "end of stream"  # as a value's tag, beside the value: a generator may yield anything


class _Source:
    """On the worker where the generator runs."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._values = func(*args, **kwargs)
        self._in_threads = not hasattr(self._values, "__anext__")
        if self._in_threads:
            self._values = _in_threads(iter(self._values))
        self._turn: asyncio.Condition | None = None  # made by the first call: it belongs to the loop they all run in
        self._yielded = 0
        self._step: asyncio.Task[Any] | None = None  # the call that the generator works for
        self._ended = False

    async def next(self, number: int) -> tuple[str, Any]:
        """The value of that number. Calls that were made in turn may begin in any order, and wait for theirs."""
        async with self._turns() as turn:
            await turn.wait_for(lambda: self._ended or self._yielded == number)
            if self._ended:
                return _END, None
            self._step = asyncio.current_task()
            try:
                return "", await self._values.__anext__()
            except StopAsyncIteration:
                self._ended = True
                return _END, None
            except BaseException:
                self._ended = True
                raise
            finally:
                self._step = None
                self._yielded += 1
                turn.notify_all()

    async def close(self) -> None:
        """The reader has stopped. A generator that awaits something is cancelled there; a thread cannot be, and the
        generator is closed when it has yielded."""
        self._ended = True
        if self._step is not None and not self._in_threads:
            self._step.cancel()
        async with self._turns() as turn:
            turn.notify_all()
            if hasattr(self._values, "aclose"):
                await self._values.aclose()

    @contextlib.asynccontextmanager
    async def _turns(self) -> AsyncIterator[asyncio.Condition]:
        if self._turn is None:
            self._turn = asyncio.Condition()
        async with self._turn:
            yield self._turn


async def _in_threads(values: Iterator[T]) -> AsyncIterator[T]:
    """An ordinary generator as an asynchronous one: each step runs in a thread of the loop's pool."""
    end = object()
    try:
        while (value := await asyncio.to_thread(next, values, end)) is not end:
            yield value  # type: ignore[misc] # mypy cannot type this form
    finally:
        if hasattr(values, "close"):
            await asyncio.to_thread(values.close)


class Stream(Generic[T]):
    """An iterator, for `for` and for `async for`, over what a generator yields on another worker; see `stream`."""

    def __init__(self, source: RRef[_Source], ahead: int, timeout: float, what: str) -> None:
        self._source = source
        self._ahead = ahead
        self._timeout = timeout
        self._what = what
        self._asked: deque[Future[tuple[str, Any]]] = deque()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Stream of {self._what} on {self._source.owner_name()!r}{', closed' if self._closed else ''}>"

    def _ask(self) -> Future[tuple[str, Any]]:
        with self._lock:
            while len(self._asked) < self._ahead:
                self._asked.append(self._source.rpc_async(self._timeout).next(next(self._numbers)))
            return self._asked.popleft()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        try:
            tag, value = self._ask().wait()
        except BaseException as error:
            self.close()
            hide_own_frames(error)
            raise
        if tag == _END:
            self._finish()
            raise StopIteration
        return value  # type: ignore[no-any-return] # typed by what it comes from

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        try:
            tag, value = await self._ask()
        except BaseException as error:
            self.close()
            hide_own_frames(error)
            raise
        if tag == _END:
            self._finish()
            raise StopAsyncIteration
        return value  # type: ignore[no-any-return] # typed by what it comes from

    def close(self) -> None:
        """Read no more: the generator on the other worker is closed. Does not wait for that."""
        if not self._closed:
            self._finish()
            self._source.rpc_async(self._timeout).close().add_done_callback(lambda _: None)

    def _finish(self) -> None:
        self._closed = True
        asked, self._asked = self._asked, deque()
        for future in asked:
            future.add_done_callback(lambda _: None)  # whatever comes of it, nobody needs to hear

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and self._asked:
            try:
                self.close()
            except Exception:  # the agent is gone, and the other worker will notice that
                self._closed = True


def stream(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ahead: int = 2,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Stream[Any]:
    """Iterate over what a generator function yields on worker `to`; with `async for`, or with `for`.

    Args:
        to: name, rank or WorkerInfo of the worker.
        func: a generator function, an `async def` function that yields, or anything that returns an iterable.
        ahead: how many values may be on their way before they are read; 1 makes the generator wait for its reader.
        timeout: seconds that one value may take.

    Examples:
        >>> list(rpc.stream("worker1", range, (3,)))
        [0, 1, 2]
    """
    check_call(func, args, kwargs)
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1, got {ahead}: a value has to be asked for to come")
    if inspect.iscoroutinefunction(func):
        raise TypeError(f"{name_of(func)} is an `async def` function that yields nothing: call it by rpc_async")
    refuse_where_plain(require_agent().layers, "rpc.stream", "export a function that returns the next values")
    source = remote(to, _Source, args=[func, tuple(args or ()), dict(kwargs or {})], timeout=timeout)
    return Stream(source, ahead, timeout, name_of(func))
