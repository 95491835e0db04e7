"""Methods of a value that lives elsewhere: `rref.rpc_sync().method(x)`.

The owner is asked once for the type of the value, which tells whether the method exists and if it returns a future.
The calls name the value by its id: the handle stays here until they are done, so the owner need not count another.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from inspect import isbuiltin
from typing import TYPE_CHECKING, Any

import torch

from telegrad.rpc.client.pending import Slot
from telegrad.rpc.functions import async_execution
from telegrad.rpc.futures import Future
from telegrad.rpc.remote_errors import hide_own_frames
from telegrad.rpc.round_trip import complete_future, start_call, wait_for_value
from telegrad.rpc.server.run_call import ASYNC_MARK
from telegrad.rpc.trust.exports import refuse_where_plain
from telegrad.rref.handles import OwnerHandle, create
from telegrad.rref.outcome import Outcome
from telegrad.rref.value_on_owner import ValueOnOwner

if TYPE_CHECKING:
    from telegrad.rref.rref import RRef

Method = Callable[..., Any]

_DIR_SECONDS = 5.0


# --- on the owner ---


@async_execution
def _rref_typeof_on_owner(value: Outcome) -> Future[type]:
    future: Future[type] = Future(what="the type of a reference's value")

    def finish() -> None:
        if value.failure is None:
            future.set_result(type(value.value))
        else:
            future.set_exception(value.failure())

    value.when_done(finish)
    return future


def _invoke(value: Outcome, method: str, args: Any, kwargs: Any) -> Any:
    return getattr(value.get(), method)(*args, **kwargs)


@async_execution
def _invoke_async_execution(value: Outcome, method: str, args: Any, kwargs: Any) -> Any:
    return getattr(value.get(), method)(*args, **kwargs)


# --- on a user ---


def type_of(rref: "RRef[Any]", timeout: float) -> Future[type]:
    """A future of the type of a reference's value."""
    handle = rref._handle
    if isinstance(handle, OwnerHandle):
        return _rref_typeof_on_owner(handle.value)  # type: ignore[return-value] # called directly it gives the future
    if handle.type is not None and not handle.type.failed:  # else ask again: a timeout then says nothing about now
        return handle.type
    handle.check_usable("_get_type() on it")
    future: Future[type] = Future(what=f"the type of {rref}")
    _start(rref, _rref_typeof_on_owner, (), timeout, future)
    handle.type = future
    return future


def _start(
    rref: "RRef[Any]", invoke: Method, args: tuple[Any, ...], timeout: float, future: Future[Any] | None
) -> Slot:
    """Call `invoke` on the owner, with the value before `args`."""
    handle = rref._handle
    handle.check_usable("a method on it")
    agent = handle.rrefs.agent
    refuse_where_plain(agent.layers, "a method of a reference", "export a function that does what the method does")
    # The handle is kept until the call is done: the owner counts on it.
    complete = None if future is None else partial(_complete, rref)
    arguments = (ValueOnOwner(handle.rref_id), *args)
    link = agent.link(handle.owner)
    subject = None if future is not None else partial(_described, rref, args[0])
    return start_call(agent, link, invoke, arguments, None, timeout, complete=complete, future=future, subject=subject)


def _described(rref: "RRef[Any]", method: str) -> str:
    return f"{method}() of {rref}"


def _complete(_: "RRef[Any]", slot: Slot) -> None:
    complete_future(slot)


def _how_to_invoke(cls: Any, method: str) -> Method:
    if issubclass(cls, torch.jit.ScriptModule) or issubclass(cls, torch._C.ScriptModule):
        return _invoke  # their methods are not attributes of the class
    return _invoke_async_execution if hasattr(getattr(cls, method), ASYNC_MARK) else _invoke


# Methods of Python's own that are called on a value by name: operators, containers, blocks. Any other name of that form
# is looked up by Python or by tools, to find out what a proxy itself is.
_CALLED_BY_NAME = {name for name in vars(operator) if name.startswith("__") and isbuiltin(vars(operator)[name])} | {
    *("__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__next__", "__len__", "__reversed__"),
    *("__bool__", "__complex__", "__divmod__", "__float__", "__int__", "__round__"),
}


class _Proxy(ABC):
    """Attributes of a proxy are methods of the value."""

    def __init__(self, rref: "RRef[Any]", timeout: float) -> None:
        self._rref = rref
        self._timeout = timeout

    def __getattr__(self, method: str) -> Method:
        if method.startswith("__") and method.endswith("__") and method not in _CALLED_BY_NAME:
            raise AttributeError(
                f"a proxy calls methods of the value, and {method!r} is none that is called by name; call a function "
                "that uses it: rpc_sync(rref.owner(), function, args=(rref,))"
            )
        return partial(self._call, method)

    def __dir__(self) -> list[str]:
        """The methods that can be called: for completion. Asks the owner for the type of the value, once."""
        cls = type_of(self._rref, _DIR_SECONDS).wait()
        return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]

    @abstractmethod
    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Have the owner call the method."""


class SyncProxy(_Proxy):
    """Returns what the method returns."""

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        rref = self._rref
        try:
            invoke = _how_to_invoke(type_of(rref, self._timeout).wait(), method)
            return wait_for_value(_start(rref, invoke, (method, args, kwargs), self._timeout, None))
        except Exception as error:
            hide_own_frames(error)
            raise


class AsyncProxy(_Proxy):
    """Returns a future of what the method returns."""

    if TYPE_CHECKING:

        def __getattr__(self, method: str) -> Callable[..., Future[Any]]: ...

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        result: Future[Any] = Future(what=f"{method}() of {self._rref}")
        known = type_of(self._rref, self._timeout)
        if known.done():
            self._call_when_known(method, args, kwargs, result, known)
        else:
            # The call starts later, in another thread, but belongs to the autograd context it is made in.
            context, with_grad = copy_context(), torch.is_grad_enabled()

            def call(known: Any) -> None:
                with torch.set_grad_enabled(with_grad):
                    context.run(self._call_when_known, method, args, kwargs, result, known)

            known.add_done_callback(call)
        return result

    def _call_when_known(self, method: str, args: Any, kwargs: Any, result: Future[Any], known: Any) -> None:
        try:
            _start(self._rref, _how_to_invoke(known.value(), method), (method, args, kwargs), self._timeout, result)
        except BaseException as error:
            result.set_exception(error)


class RemoteProxy(_Proxy):
    """Returns a reference to what the method returns."""

    if TYPE_CHECKING:

        def __getattr__(self, method: str) -> "Callable[..., RRef[Any]]": ...

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        rref, handle = self._rref, self._rref._handle
        invoke = _how_to_invoke(type_of(rref, self._timeout).wait(), method)
        arguments = (ValueOnOwner(rref._handle.rref_id), method, args, kwargs)
        made = create(handle.rrefs, handle.owner, invoke, arguments, None, self._timeout, keep=rref)
        return type(rref)._of(made)
