"""`rpc_sync` and `rpc_async`: a function, some arguments, another worker."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, Unpack, overload

from telegrad.errors import RpcTimeout, WorkerDied
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.function_table import name_of
from telegrad.rpc.client.link import Link
from telegrad.rpc.current import require_agent, running
from telegrad.rpc.futures import Future
from telegrad.rpc.options import UNSET_RPC_TIMEOUT, as_int, as_timeout
from telegrad.rpc.remote_errors import hide_own_frames
from telegrad.rpc.round_trip import complete_future, start_call, wait_for_value
from telegrad.rpc.workers import WorkerInfo

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None
Worker = str | int | WorkerInfo


def check_call(func: Any, args: Any, kwargs: Any) -> None:
    """Raise TypeError if this is not a function, or these are not its arguments."""
    if not callable(func) and (type(func) is not str or not func):  # text is the name of an exported function
        raise TypeError(f"function should be callable, got {func!r}")
    if (
        args is not None
        and type(args) is not tuple
        and (isinstance(args, str | bytes) or not isinstance(args, Sequence))
    ):
        raise TypeError(f"args must be a tuple or a list, got {args!r}; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict, got {kwargs!r}")


def link_to(agent: Agent, to: Worker) -> Link:
    """The link to the worker meant by a name, an id or a WorkerInfo."""
    link = agent.links.get(to) if type(to) is str else None
    return link if link is not None and link.current is not None else agent.link(agent.find(to))


@overload
def rpc_sync(
    to: Worker,
    func: str,
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> Any: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[[], Coroutine[Any, Any, T]],
    args: None = None,
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[[], T],
    args: None = None,
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Args = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = UNSET_RPC_TIMEOUT,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[..., T],
    args: Args = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = UNSET_RPC_TIMEOUT,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[..., T],
    args: list[Any],
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
def rpc_sync(
    to: Worker,
    func: Callable[..., Any] | str,
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> Any:
    """Run `func(*args, **kwargs)` on worker `to` and return what it returns.

    Args:
        to: name, rank or WorkerInfo of the worker; may be this one.
        func: anything callable that can be sent; a function of a module both workers can import is sent by name.
            Text is the name under which the worker has exported a function (`rpc.export`).
            An `async def` function is awaited on the other worker.
        timeout: seconds to wait; 0 for no limit. By default the `rpc_timeout` of the options.
        retries: how often to run the call again if the worker dies meanwhile; only for functions that may run twice.

    Raises what `func` raises, as its own type; RpcTimeout at the deadline; WorkerDied if the worker is lost.

    Examples:
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
    """
    if kwargs is not None or not callable(func) or (args is not None and type(args) is not tuple):
        check_call(func, args, kwargs)
    agent = running.agent or require_agent()
    if timeout != UNSET_RPC_TIMEOUT:
        timeout = as_timeout(timeout)
    if retries and as_int("retries", retries) < 0:
        raise ValueError(f"retries must not be negative, got {retries}")
    while True:
        link = link_to(agent, to)
        try:
            return wait_for_value(start_call(agent, link, func, args, kwargs, timeout))
        except WorkerDied as error:
            member = link.member
            if retries <= 0 or error.incarnation != member.incarnation:  # it lives, and tells of the end of another
                hide_own_frames(error)
                raise
            retries -= 1
            agent.peers.wait_for_return(member, timeout if timeout > 0 else agent.rpc_timeout)
        except BaseException as error:
            hide_own_frames(error)
            raise


@overload
def rpc_async(
    to: Worker, func: str, args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]: ...
@overload
def rpc_async(
    to: Worker,
    func: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Worker,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Worker,
    func: Callable[[], Coroutine[Any, Any, T]],
    args: None = None,
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Worker, func: Callable[[], T], args: None = None, kwargs: None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[T]: ...
@overload
def rpc_async(
    to: Worker,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Args = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Worker,
    func: Callable[..., T],
    args: Args = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Worker, func: Callable[..., T], args: list[Any], kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[T]: ...
def rpc_async(
    to: Worker,
    func: Callable[..., Any] | str,
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Like `rpc_sync`, but returns a Future at once; it can be waited for, awaited, and given callbacks.

    Examples:
        >>> futures = [rpc.rpc_async("worker1", pow, (n, 2)) for n in range(3)]
        >>> [future.wait() for future in futures]
        [0, 1, 4]
    """
    if kwargs is not None or not callable(func) or (args is not None and type(args) is not tuple):
        check_call(func, args, kwargs)
    agent = running.agent or require_agent()
    link = link_to(agent, to)
    future: Future[Any] = Future(what="")  # which `start_call` knows
    try:
        start_call(agent, link, func, args, kwargs, as_timeout(timeout), complete=complete_future, future=future)
    except (WorkerDied, RpcTimeout) as error:
        future.what = f"{name_of(func)}() on worker {link.member.name!r}"
        future.set_exception(error)
    return future
