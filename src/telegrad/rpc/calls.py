"""`rpc_sync` and `rpc_async`: a function, some arguments, another worker."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec

from telegrad.errors import WorkerDied
from telegrad.rpc.agent import Agent, OnReply
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rpc.invoke import pack_call, remember_function
from telegrad.rpc.options import UNSET_RPC_TIMEOUT, as_timeout
from telegrad.rpc.pending import Slot
from telegrad.rpc.workers import Member, WorkerInfo
from telegrad.wire.messages import AnyMessage, PythonCall

T = TypeVar("T")
Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None
Worker = str | int | WorkerInfo


def name_of(func: Any) -> str:
    """How a function is called in errors and traces."""
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)


def check_call(func: Any, args: Any, kwargs: Any) -> None:
    """Raise TypeError for what cannot be called so."""
    if not callable(func):
        raise TypeError(f"function should be callable, got {func!r}")
    if args is not None and not isinstance(args, Sequence):
        raise TypeError(f"args must be a tuple or a list, got {args!r}; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict, got {kwargs!r}")


def start_call(
    agent: Agent,
    member: Member,
    func: Any,
    args: Any,
    kwargs: Any,
    timeout: float,
    *,
    make: Callable[[int, bytes, float], AnyMessage] = PythonCall,
    future: Future[Any] | None = None,
    finish: Callable[[Any], None] | None = None,
) -> tuple[Slot, OnReply | None]:
    """Send a call. With a `future` it is completed when the reply comes; `finish` may see the value first."""
    if timeout == UNSET_RPC_TIMEOUT:
        timeout = agent.rpc_timeout
    link = agent.link(member)
    number, definition, full, packed = pack_call(agent, link, func, args, kwargs)
    message = make(number, definition, timeout)
    whole = message if full == definition else make(number, full, timeout)
    on_reply: OnReply | None = None
    for hook in agent.call_hooks:
        wrapped = hook(member.worker_id, message, packed.tensors)
        if wrapped is not None:
            inner, (message, on_reply) = message, wrapped
            whole = message if whole is inner else msgspec.structs.replace(message, call=whole)
    complete = None if future is None else functools.partial(_complete, agent, member, future, on_reply, finish)
    agent.calls_made += 1
    slot = agent.send(
        member,
        message,
        packed,
        timeout=timeout,
        what=lambda: f"{name_of(func)}() on worker {member.name!r}",
        complete=complete,
        future=future,
        whole=whole,
    )
    if definition:
        remember_function(link, func, number, definition)
    return slot, on_reply


def _complete(
    agent: Agent,
    member: Member,
    future: Future[Any],
    on_reply: OnReply | None,
    finish: Callable[[Any], None] | None,
    slot: Slot,
) -> None:
    future.help = None
    try:
        value = agent.value(slot, member, on_reply)
        if finish is not None:
            finish(value)
    except BaseException as error:
        future.set_exception(error)
        return
    future.set_result(value)


@overload
def rpc_sync(
    to: Worker,
    func: Callable[..., Awaitable[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
@overload
def rpc_sync(
    to: Worker,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retries: int = 0,
) -> T: ...
def rpc_sync(
    to: Worker,
    func: Callable[..., Any],
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
            An `async def` function is awaited on the other worker.
        timeout: seconds to wait; 0 for no limit. By default the `rpc_timeout` of the options.
        retries: how often to run the call again if the worker dies meanwhile; only for functions that may run twice.

    Raises what `func` raises, as its own type; RpcTimeout at the deadline; WorkerDied if the worker is lost.
    """
    check_call(func, args, kwargs)
    agent = require_agent()
    timeout = as_timeout(timeout)
    while True:
        member = agent.find(to)
        try:
            slot, on_reply = start_call(agent, member, func, args, kwargs, timeout)
            agent.link(member).wait(slot)
            return agent.value(slot, member, on_reply)
        except WorkerDied:
            if retries <= 0:
                raise
            retries -= 1
            agent.wait_for_return(member, timeout if timeout > 0 else agent.rpc_timeout)


@overload
def rpc_async(
    to: Worker,
    func: Callable[..., Awaitable[T]],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Worker, func: Callable[..., T], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[T]: ...
def rpc_async(
    to: Worker, func: Callable[..., Any], args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    """Like `rpc_sync`, but returns a Future at once; it can be waited for, awaited, and given callbacks."""
    check_call(func, args, kwargs)
    agent = require_agent()
    member = agent.find(to)
    future: Future[Any] = Future(what=f"{name_of(func)}() on worker {member.name!r}")
    start_call(agent, member, func, args, kwargs, as_timeout(timeout), future=future)
    return future
