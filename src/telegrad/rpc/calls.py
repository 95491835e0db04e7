"""`rpc_sync` and `rpc_async`: a function, some arguments, another worker."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, Unpack, overload

import torch

from telegrad.errors import RpcTimeout, WorkerDied
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.function_table import name_of, sendable
from telegrad.rpc.client.link import NOTHING, Link
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.client.replies import reply_frame
from telegrad.rpc.current import require_agent, running
from telegrad.rpc.futures import Future
from telegrad.rpc.layer import Around, CallProfiler, OnReply
from telegrad.rpc.options import UNSET_RPC_TIMEOUT, as_timeout
from telegrad.rpc.packing import discard, pack_counted, unpack_from
from telegrad.rpc.remote_errors import hide_own_frames
from telegrad.rpc.trust.exports import exported_name
from telegrad.rpc.workers import WorkerInfo
from telegrad.wire.codec import NOT_FLAT, Packed, pack_call, pack_plain, unpack_flat
from telegrad.wire.frames import REPLY
from telegrad.wire.messages import AnyMessage, PythonCall

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None
Worker = str | int | WorkerInfo
Complete = Callable[[Slot], None]  # what to do when the reply has come or will not, in whichever thread finds out
_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined] # torch declares no type


def check_call(func: Any, args: Any, kwargs: Any) -> None:
    """Raise TypeError if this is not a function, or these are not its arguments."""
    if not callable(func) and (type(func) is not str or not func):  # text is the name of an exported function
        raise TypeError(f"function should be callable, got {func!r}")
    if args is not None and type(args) is not tuple and not isinstance(args, Sequence):
        raise TypeError(f"args must be a tuple or a list, got {args!r}; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict, got {kwargs!r}")


def start_call(
    agent: Agent,
    link: Link,
    func: Any,
    args: Any,
    kwargs: Any,
    timeout: float,
    *,
    make: Callable[[int, bytes], AnyMessage] | None = None,
    complete: Complete | None = None,
    future: Future[Any] | None = None,
    patience: float | None = None,
    subject: Callable[[], str] | None = None,
) -> Slot:
    """Send the call of a function; `make` makes its message, if that is no PythonCall. `patience`: how long to wait for
    the reply, if longer. `subject`: what it is called in errors, if not by the function's name."""
    around: Around | None = None
    if _profiling() and not agent.layers.plain and (profiler := agent.find_layer(CallProfiler)) is not None:
        how = "remote" if make is not None else "sync" if future is None else "async"
        around = profiler.begin(how, func, link.member)
    if agent.layers.plain:
        func = exported_name(func)
    try:
        callee = link.functions.known.get(func)
    except TypeError:  # it cannot be hashed: not a function that has a number
        callee = None
    message: AnyMessage
    if callee is not None:
        number, definition, what, by_number = callee
        message = by_number if make is None else make(number, b"")
    else:
        link.connection()  # the handshake tells whether both run the same program
        defined = link.functions.define(func, link.main_by_value)
        number, definition, what, _ = defined
        message = (make or PythonCall)(number, definition)
    args = tuple(args) if args else ()
    packed = pack_call(args) if number and not kwargs else None
    if packed is None:
        packed = _pack_any_call(agent, link, func, number, args, kwargs or {})
    slot = start_request(
        agent,
        link,
        message,
        packed,
        timeout=patience if patience is not None else agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout,
        what=future.what if future is not None else subject or what,
        definition=definition,
        complete=complete,
        future=future,
        around=around,
    )
    if callee is None:
        link.functions.sent(func, defined)
    return slot


def _pack_any_call(agent: Agent, link: Link, func: Any, number: int, args: Any, kwargs: Any) -> Packed:
    """The arguments of a call that has more to it than tensors and numbers, and the function if it has no number."""
    value = (args, kwargs) if number else (sendable(func), args, kwargs)
    if type(func) is str:  # an exported function may be that of a worker which takes nothing pickled
        return pack_plain(value)
    return pack_counted(agent.layers, link.member, value, link.main_by_value)


def start_request(
    agent: Agent,
    link: Link,
    message: AnyMessage,
    packed: Packed = NOTHING,
    *,
    timeout: float,
    what: str | Callable[[], str],
    definition: bytes = b"",
    complete: Complete | None = None,
    future: Future[Any] | None = None,
    around: Around | None = None,
) -> Slot:
    """Send a request that carries values of the user, which the layers above may wrap, and `around` once more."""
    on_reply: OnReply | None = None
    try:
        for wrap in agent.layers.wrap_call:
            wrapped = wrap(link.member.worker_id, message, packed.tensors)
            if wrapped is not None:
                message, outer = wrapped
                if on_reply is not None:
                    outer.inner = on_reply  # type: ignore[attr-defined] # of layers that wrap what others wrapped
                on_reply = outer
        if around is not None:
            message, on_reply = around(message, on_reply)
        agent.runtime.calls_made += 1
        return link.send(
            message,
            packed,
            timeout=timeout,
            what=what,
            complete=complete,
            future=future,
            on_reply=on_reply,
            definition=definition,
        )
    except BaseException:
        packed.unsent()
        if on_reply is not None:
            on_reply.unsent()
        raise


def wait_for_value(slot: Slot) -> Any:
    """Wait in this thread for the reply of a request; its value."""
    try:
        slot.link.wait(slot)
        return value_of(slot)
    finally:
        if slot.in_place:
            slot.end_in_place()


def value_of(slot: Slot) -> Any:
    """The value that came as the reply of a request; raises what came instead."""
    frame = slot.frame
    if frame is None or frame.kind != REPLY or slot.error is not None:
        frame = reply_frame(slot)
    tensors, payload = frame.take_tensors(), frame.payload
    if slot.on_reply is not None:
        try:
            _, tensors = slot.on_reply(frame.message, tensors)
        except BaseException:
            discard(slot.link.runtime.layers, slot.link.member, payload, tensors)
            raise
    elif tensors and (look := slot.link.runtime.layers.on_plain_reply) is not None:
        tensors = look(slot.what, tensors)
    value = unpack_flat(payload, tensors)
    if value is not NOT_FLAT:
        return value
    return unpack_from(slot.link.runtime.layers, slot.link.member, payload, tensors) if len(payload) else None


def complete_future(slot: Slot) -> None:
    """The reply of a request came, or will not: complete its future."""
    future = slot.future
    future.awaited = None
    try:
        value = value_of(slot)
    except BaseException as error:
        future.set_exception(error)
        return
    future.set_result(value)


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
    future: Future[Any] = Future(what=f"{name_of(func)}() on worker {link.member.name!r}")
    try:
        start_call(agent, link, func, args, kwargs, as_timeout(timeout), complete=complete_future, future=future)
    except (WorkerDied, RpcTimeout) as error:
        future.set_exception(error)
    return future
