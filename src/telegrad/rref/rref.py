"""`RRef` and `remote`: a value that lives on one worker, named from any."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack, cast, overload

import torch

from telegrad.errors import RRefError
from telegrad.ids import short_id
from telegrad.rpc.calls import Args, Kwargs, Worker, check_call
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rpc.layer import Layer
from telegrad.rpc.options import UNSET_RPC_TIMEOUT, as_timeout
from telegrad.rpc.remote_errors import hide_own_frames
from telegrad.rpc.torch_modes import stand_in
from telegrad.rpc.workers import WorkerInfo
from telegrad.rref import proxy
from telegrad.rref.handles import Handle, OwnerHandle, create, hold
from telegrad.rref.rref_context import rrefs_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

NO_CONTEXT = -1


class BackwardRunner(Layer):
    """What `RRef.backward` asks of the layer that runs passes; it derives from this."""

    def backward_from(self, rref: "RRef[Any]", context_id: int, retain_graph: bool, create_graph: bool) -> None:
        """Run a pass whose root is the value of `rref`."""
        raise NotImplementedError


class RRef(Generic[T]):
    """A reference to a value of type `T` that lives on one worker, its owner.

    `RRef(value)` makes this worker the owner; `remote` makes another one the owner of what a function returns there. A
    reference can be sent to any worker, in arguments and results. The value is kept while anyone has a reference to it.

    Examples:
        >>> words = rpc.remote("worker1", list, ("abc",))
        >>> words.rpc_sync().index("c"), words.to_here(), words.owner_name()
        (2, ['a', 'b', 'c'], 'worker1')
    """

    _handle: Handle

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule):
            raise RRefError("type_hint should only be specified when the RRef being created contains a ScriptModule.")
        self._handle = hold(rrefs_of(require_agent()), value)

    @classmethod
    def _of(cls, handle: Handle) -> "RRef[T]":
        made = cls.__new__(cls)
        made._handle = handle
        return made

    def __repr__(self) -> str:
        handle = self._handle
        if not stand_in.in_force.rrefs_show_types:
            return repr(handle)
        kind = handle.kind()
        return f"<RRef {short_id(handle.rref_id)} of {handle.owner.name!r}{': ' if kind else ''}{kind}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Calls do not come here: see travel.py.
        raise RRefError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def _serialize(self) -> Any:
        """What torch takes a reference apart with. Here only a message does, which knows where it goes."""
        self._handle.check_usable("fork an UserRRef")
        raise RRefError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    # --- where ---

    def owner(self) -> WorkerInfo:
        """The worker where the value lives."""
        return self._handle.owner.info

    def owner_name(self) -> str:
        """The name of the worker where the value lives."""
        return self._handle.owner.name

    def is_owner(self) -> bool:
        """Whether the value lives here."""
        return isinstance(self._handle, OwnerHandle)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to keep the value for this reference."""
        return isinstance(self._handle, OwnerHandle) or self._handle.confirmed()

    # --- the value ---

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value; on any worker but the owner a copy. Waits until it exists; raises what its creation raised."""
        try:
            return cast(T, self._handle.fetch(as_timeout(timeout)))
        except Exception as error:
            hide_own_frames(error)
            raise

    def local_value(self) -> T:
        """The value itself, on its owner. Waits until it exists, for as long as the function that makes it runs."""
        handle = self._handle
        if not isinstance(handle, OwnerHandle):
            text = repr(handle).replace("RRefId = ", "rref_id=").replace("ForkId = ", "fork_id=")
            raise RRefError(
                f"For {text}, can't call localValue() on user {handle.rrefs.agent.info}. "
                f"Call it on owner {self.owner()}; here, `to_here()` gets a copy, and `rpc_sync().method()` calls it "
                "there"
            )
        handle.check_usable("local_value() on it")
        handle.value.wait()
        return cast(T, handle.value.get())

    def _get_future(self) -> Future[None]:
        """A future that is done when the owner has run the call that creates the value."""
        if self._handle.creation is not None:
            return self._handle.creation.future()
        future: Future[None] = Future(what=f"RRef creation of {self}")
        future.set_result(None)
        return future

    _get_profiling_future = _get_future  # by then the events of the call are in the profile it was made under

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, or a future of it if not `blocking`. An owner is asked once."""
        future = proxy.type_of(self, as_timeout(timeout))
        return future.wait() if blocking else future

    # --- calls of its methods ---

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A proxy: `rref.rpc_sync().method(x)` runs the method on the owner and returns what it returns.

        To a type checker it is the value itself, whose methods have the right types; at run time it has methods only.
        """
        return cast(T, proxy.SyncProxy(self, as_timeout(timeout)))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> "proxy.AsyncProxy":
        """A proxy: `rref.rpc_async().method(x)` runs the method on the owner and returns a future."""
        return proxy.AsyncProxy(self, as_timeout(timeout))

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> "proxy.RemoteProxy":
        """A proxy: `rref.remote().method(x)` runs the method on the owner and returns a reference to the result."""
        return proxy.RemoteProxy(self, as_timeout(timeout))

    # --- gradients ---

    def backward(
        self, dist_autograd_ctx_id: int = NO_CONTEXT, retain_graph: bool = False, *, create_graph: bool = False
    ) -> None:
        """Run the backward pass with this reference as its root: of a context, or on its owner without one, locally."""
        if dist_autograd_ctx_id == NO_CONTEXT:
            if not self.is_owner():
                raise RRefError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            self._root().backward(retain_graph=retain_graph or None, create_graph=create_graph)
            return
        runner = self._handle.rrefs.agent.find_layer(BackwardRunner)
        if runner is None:
            raise RRefError("a backward pass over workers needs telegrad.engine, which is not installed on this agent")
        if self.is_owner():
            self._root()
        runner.backward_from(self, dist_autograd_ctx_id, retain_graph, create_graph)

    def _root(self) -> Any:
        """The value, if a backward pass can start at it."""
        value: Any = self.local_value()
        if not isinstance(value, torch.Tensor):
            raise RRefError("RRef should contain a tensor for .backward()")
        return value


@overload
def remote(
    to: Worker, func: str, args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[Any]: ...
@overload
def remote(
    to: Worker,
    func: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(
    to: Worker,
    func: Callable[[Unpack[Ts]], T],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(
    to: Worker,
    func: Callable[[], Coroutine[Any, Any, T]],
    args: None = None,
    kwargs: None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(
    to: Worker, func: Callable[[], T], args: None = None, kwargs: None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[T]: ...
@overload
def remote(
    to: Worker,
    func: Callable[..., Coroutine[Any, Any, T]],
    args: Args = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(
    to: Worker,
    func: Callable[..., T],
    args: Args = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@overload
def remote(
    to: Worker, func: Callable[..., T], args: list[Any], kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[T]: ...
def remote(
    to: Worker,
    func: Callable[..., Any] | str,
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run `func(*args, **kwargs)` on worker `to` and keep what it returns there; returns a reference to it at once.

    Args:
        to: name, rank or WorkerInfo of the worker; may be this one.
        func: as for `rpc_sync`; often a class, whose instance then lives on `to`.
        timeout: seconds that the function may take; when they have passed, the reference is of no use here.

    What `func` raises is raised by `to_here`, on whichever worker.

    Examples:
        >>> words = rpc.remote("worker1", list, ("abc",))
        >>> words.to_here()
        ['a', 'b', 'c']
    """
    check_call(func, args, kwargs)
    agent = require_agent()
    return RRef._of(create(rrefs_of(agent), agent.find(to), func, args, kwargs, as_timeout(timeout)))
