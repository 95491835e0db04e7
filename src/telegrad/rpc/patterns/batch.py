"""Many small calls in one message: the cost of a message is paid once, and in an autograd context there is one Send.

The calls of a batch to one worker run there one after the other, in one thread, in the order they were made. Each has
its own result or error. Without a batch, calls in flight at the same time already share writes; a batch saves the rest:
headers, replies, bookkeeping, and the two autograd nodes that every message leaves behind.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from telegrad.errors import TelegradError
from telegrad.rpc.calls import Worker, check_call, rpc_async
from telegrad.rpc.client.function_table import name_of
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rpc.options import UNSET_RPC_TIMEOUT
from telegrad.rpc.remote_errors import describe_exception, rebuild_exception
from telegrad.rpc.threads.yield_turn import local
from telegrad.rpc.trust.exports import refuse_where_plain

T = TypeVar("T")

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Batch:
    """Collects calls and sends them when its `with` block ends; see `batch`."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._calls: dict[str, list[tuple[_Call, Future[Any]]]] = {}
        self._sent = False

    def rpc_async(
        self,
        to: Worker,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Future[T]:
        """Add a call; its future is done some time after the block has ended."""
        check_call(func, args, kwargs)
        if inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(f"{name_of(func)} is an `async def` function; call it without a batch, it needs no thread")
        if self._sent:
            raise TelegradError(f"this batch has been sent; {name_of(func)}() needs a new one")
        agent = require_agent()
        refuse_where_plain(agent.layers, "rpc.batch", "call exported functions one by one")
        name = agent.find(to).name
        future: Future[T] = Future(what=f"{name_of(func)}() on worker {name!r}, in a batch")
        call = (func, tuple(args or ()), dict(kwargs or {}))
        self._calls.setdefault(name, []).append((call, future))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._sent = True
        for name, entries in self._calls.items():
            futures = [future for _, future in entries]
            if error is not None:
                _fail(futures, TelegradError(f"the batch was not sent: {error!r}"))
                continue
            try:
                whole = rpc_async(name, _run_all, args=([call for call, _ in entries],), timeout=self._timeout)
            except Exception as problem:
                _fail(futures, problem)
            else:
                whole.add_done_callback(lambda whole, futures=futures: _share_out(whole, futures))  # type: ignore[misc] # mypy cannot type a default of a lambda


def batch(timeout: float = UNSET_RPC_TIMEOUT) -> Batch:
    """Send many small calls in one message to each worker, when the block ends.

    Examples:
        >>> with rpc.batch() as batch:
        ...     futures = [batch.rpc_async("worker1", abs, (-n,)) for n in range(3)]
        >>> [future.wait() for future in futures]
        [0, 1, 2]
    """
    return Batch(timeout)


def _run_all(calls: list[_Call]) -> list[tuple[bool, Any]]:
    """On the other worker: the result or the error of each call."""
    outcomes: list[tuple[bool, Any]] = []
    for func, args, kwargs in calls:
        try:
            outcomes.append((True, func(*args, **kwargs)))
        except Exception as error:
            turn = local.turn
            main_by_value = turn is not None and turn.main_by_value
            message, payload, tensors, _ = describe_exception(error, require_agent().info, main_by_value)
            outcomes.append((False, (message, b"" if tensors else payload)))
    return outcomes


def _share_out(whole: Any, futures: list[Future[Any]]) -> None:
    try:
        outcomes = whole.value()
    except Exception as error:
        _fail(futures, error)
        return
    for future, (succeeded, value) in zip(futures, outcomes, strict=True):
        if succeeded:
            future.set_result(value)
        else:
            message, payload = value
            future.set_exception(rebuild_exception(message, payload, []))


def _fail(futures: list[Future[Any]], error: BaseException) -> None:
    for future in futures:
        future.set_exception(error)
