"""The same function on many workers, many arguments over the workers, and futures in the order they are done."""

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from telegrad.errors import RpcTimeout
from telegrad.rpc.calls import Worker, rpc_async
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rpc.options import UNSET_RPC_TIMEOUT
from telegrad.rpc.remote_errors import hide_own_frames
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import WorkerInfo

T = TypeVar("T")

AHEAD = 2  # calls that a worker has beside the one it runs: it need not wait for the next


def get_worker_infos() -> list[WorkerInfo]:
    """The workers of the job that are alive as far as this one knows, itself included, by id.

    Examples:
        >>> [info.name for info in rpc.get_worker_infos()]
        ['worker0', 'worker1']
    """
    agent = require_agent()
    agent.peers.look_for_news()
    return [member.info for member in agent.directory.members() if not agent.is_dead(member)]


def gather(
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: Iterable[Worker] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, T]:
    """Run a function on several workers at once; what it returned, by the worker's name, in the order of `workers`.

    By default on all workers, this one included. The first error in that order is raised, when all calls have ended.

    Examples:
        >>> rpc.gather(pow, (2, 3))
        {'worker0': 8, 'worker1': 8}
    """
    _check_function(func, "gather(func, args, workers=...)")
    names = _names(workers)
    futures: list[Future[T]] = [
        rpc_async(name, func, args=list(args or ()), kwargs=kwargs or {}, timeout=timeout) for name in names
    ]
    for _ in as_completed(futures):
        pass
    try:
        return {name: future.value() for name, future in zip(names, futures, strict=True)}
    except Exception as error:
        hide_own_frames(error)
        raise


def map(
    func: Callable[..., T],
    items: Iterable[Any],
    *,
    workers: Iterable[Worker] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Iterator[T]:
    """`func(item)` for each item, spread over the workers; the results in the order of the items.

    A worker gets its next item when it has nearly done the ones it has, so a slow one gets fewer. By default all other
    workers take part; this one only if it is alone. An error ends the iteration; calls under way are left to end.

    Examples:
        >>> list(rpc.map(abs, [-1, -2, -3]))
        [1, 2, 3]
    """
    _check_function(func, "map(func, items, workers=...)")
    try:
        names = _names(workers) if workers is not None else _others()
        if not names:
            raise ValueError("rpc.map has no workers to give items to: `workers` is empty")
        yield from _spread(func, items, names, timeout)
    except Exception as error:
        hide_own_frames(error)
        raise


def _spread(func: Callable[..., T], items: Iterable[Any], names: list[str], timeout: float) -> Iterator[T]:
    free = deque(itertools.chain.from_iterable(itertools.repeat(names, AHEAD)))
    waiting: deque[Future[T]] = deque()
    running: dict[Any, str] = {}
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in items:
        if not free:
            free.append(running.pop(_next_done(done)))
        name = free.popleft()
        future: Future[T] = rpc_async(name, func, args=[item], timeout=timeout)
        running[future] = name
        waiting.append(future)
        future.add_done_callback(done.put)
        while waiting and waiting[0].done():
            yield waiting.popleft().value()
    while waiting:
        yield waiting.popleft().wait()


def _check_function(func: Any, usage: str) -> None:
    if not callable(func) and not isinstance(func, str):  # text is the name of an exported function
        raise TypeError(f"rpc.{usage}: the function comes first, got {func!r}")


def as_completed(futures: Iterable[Future[T]], timeout: float | None = None) -> Iterator[Future[T]]:
    """The futures in the order in which they are done, each as soon as it is. RpcTimeout names those still missing.

    Examples:
        >>> futures = [rpc.rpc_async("worker1", abs, (-n,)) for n in range(3)]
        >>> sorted(future.value() for future in rpc.as_completed(futures))
        [0, 1, 2]
    """
    missing = dict.fromkeys(futures)
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    deadline = None if timeout is None else time.monotonic() + timeout
    for future in missing:
        future.add_done_callback(done.put)
    while missing:
        try:
            future = _next_done(done, None if deadline is None else deadline - time.monotonic())
        except queue.Empty:
            names = ", ".join(future.what for future in missing)
            raise RpcTimeout(f"not done after {timeout:g} s: {names}") from None
        del missing[future]
        yield future


def _next_done(done: "queue.SimpleQueue[Any]", seconds: float | None = None) -> Any:
    with blocking():
        return done.get(timeout=None if seconds is None else max(seconds, 0.0))


def _names(workers: Iterable[Worker] | None) -> list[str]:
    if workers is None:
        return [info.name for info in get_worker_infos()]
    agent = require_agent()
    return [agent.find(worker).name for worker in ([workers] if isinstance(workers, str) else workers)]


def _others() -> list[str]:
    here = require_agent().info.name
    return [info.name for info in get_worker_infos() if info.name != here] or [here]
