"""A call as it travels, and what happens to it on the other side.

A function that both workers can find by name is sent once per link and is a number afterwards. Anything else callable
(a bound method, a lambda, a partial) travels with its arguments. On arrival a function runs in the thread that read it;
one that returns a Future or a coroutine is answered when that is done, and no thread waits for it.
"""

import asyncio
import functools
import operator
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import BuiltinFunctionType, CoroutineType, FunctionType
from typing import Any

import torch

from telegrad.errors import CallCancelled, ProtocolError, TelegradError
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.link import Link
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.packing import discard, pack_for, unpack_from
from telegrad.rpc.server.request import Request
from telegrad.rpc.server.session import Definition, Session
from telegrad.wire.codec import EMPTY_CALL, Packed, pack, unpack
from telegrad.wire.messages import CancelCall, PythonCall, PythonRemoteCall, PythonReply

ASYNC_MARK = "_wrapped_async_rpc_function"  # what torch's own decorator leaves on a function, too

_BY_NAME = (FunctionType, BuiltinFunctionType, type)
_MAX_FUNCTIONS = 4096
_NOT_NUMBERED = 0

Result = Callable[[Any], None]
Failure = Callable[[BaseException], None]


def pack_call(agent: Agent, link: Link, func: Any, args: Any, kwargs: Any) -> tuple[int, bytes, bytes, Packed]:
    """A call to be sent: number of the function, its definition if needed now, if sent again, and the arguments."""
    args = tuple(args) if args else ()
    if isinstance(func, _BY_NAME):
        known = link.functions.get(func)
        new = known is None
        if new:
            known = _define(link, func)
        if known is not None:
            number, full = known
            packed = (
                pack_for(agent, link.member, (args, kwargs or {}), link.main_by_value) if args or kwargs else EMPTY_CALL
            )
            return number, full if new else b"", full, packed
    packed = pack_for(agent, link.member, (_sendable(func), args, kwargs or {}), link.main_by_value)
    return _NOT_NUMBERED, b"", b"", packed


def remember_function(link: Link, func: Any, number: int, definition: bytes) -> None:
    """The call that defines `func` was sent: from now on its number is enough."""
    if definition:
        link.functions.setdefault(func, (number, definition))


def _define(link: Link, func: Any) -> tuple[int, bytes] | None:
    """A number and a definition for a function that can be found by name; None for any other."""
    link.connection()  # the handshake tells whether both run the same program
    if len(link.functions) >= _MAX_FUNCTIONS or "<" in getattr(func, "__qualname__", "<"):
        return None
    packed = pack(_sendable(func), main_by_value=link.main_by_value)
    if packed.tensors:
        return None
    return link.next_function_number(), packed.payload


class ScriptedFunction:
    """A TorchScript function by its qualified name: it cannot be pickled, but both sides have compiled it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = torch.jit._state._python_cu.find_function(self.name)
        if function is None:
            raise AttributeError(
                f"this worker has not compiled the TorchScript function {self.name!r}: import its module"
            )
        try:
            return function(*args, **kwargs)
        except torch.jit.Error as error:  # a class of its own, for which no caller outside TorchScript looks
            raise RuntimeError(str(error)) from error


class NamedOperator:
    """An operator of `torch.ops`, which cannot be pickled either; it arrives as the operator of that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return find_operator, (self.name,)


def find_operator(name: str) -> Any:
    """The operator of this name, with its overload where that is named too."""
    return operator.attrgetter(name)(torch.ops)


def _sendable(func: Any) -> Any:
    if isinstance(func, torch.jit.ScriptFunction):
        return ScriptedFunction(func.qualified_name)
    if isinstance(func, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return NamedOperator(str(func))
    return func


def resolve(session: Session, number: int) -> Any:
    """The function that a number stands for on this link."""
    functions = session.functions
    function = functions.get(number)
    if function is None:
        raise ProtocolError(f"call of function number {number}, which was never defined on this link")
    if type(function) is Definition:
        function = functions[number] = unpack(function.payload, [])
    return function


class Later:
    """Instead of a result that is not there yet: that of a coroutine, or of a function that returned a future."""

    __slots__ = ("_agent", "_func", "_result")

    def __init__(self, agent: Agent, func: Any, result: Any) -> None:
        self._agent = agent
        self._func = func
        self._result = result

    def give_to(self, done: Result, failed: Failure, request: Request) -> None:
        """Call one of the two when the result is there, from whichever thread."""
        if isinstance(self._result, CoroutineType):
            cancel = self._agent.layer(CallService).event_loop().run(self._result, done, failed)
            request.session.cancellations.on_ask(request.frame.request_id, cancel)
        else:
            _when_done(self._func, self._result, done, failed)


def run_call(agent: Agent, request: Request, call: PythonCall | PythonRemoteCall) -> Any:
    """Run the call of a request; its result, which nothing here holds any longer, or a `Later`."""
    frame = request.frame
    try:
        func: Any = resolve(request.session, call.function) if call.function else None
    except BaseException:
        discard(agent, request.caller, frame.payload, frame.take_tensors())
        raise
    tensors = agent.received(request)
    if call.function:
        args, kwargs = unpack_from(agent, request.caller, frame.payload, tensors)
    else:
        func, args, kwargs = unpack_from(agent, request.caller, frame.payload, tensors)
    # Nothing but the function itself may hold its arguments, so that their memory goes back as soon as it lets go.
    frame.payload = b""
    del tensors
    if request.session.cancellations:
        request.session.cancellations.check(frame.request_id)
    if request.scope is None:
        result = func(*args, **kwargs)
    else:
        with request.scope():
            result = func(*args, **kwargs)
    if isinstance(result, CoroutineType) or hasattr(func, ASYNC_MARK):
        return Later(agent, func, result)
    return result


def _when_done(func: Any, result: Any, done: Result, failed: Failure) -> None:
    if not isinstance(result, torch._C.Future):
        raise TelegradError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but {getattr(func, '__qualname__', func)} returned {type(result).__name__}"
        )

    def finish(future: Any) -> None:
        try:
            done(future.value())
        except BaseException as error:
            failed(error)

    result.add_done_callback(finish)


class CallService(Layer):
    """The layer that runs users' functions, and awaits their coroutines in an event loop of its own."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()

    def messages(self) -> Mapping[type[Any], Served]:
        """Calls, and word that nobody waits for one any more."""
        return {
            PythonCall: Served(functools.partial(serve_call, self._agent)),
            CancelCall: Served(_serve_cancel, counts_as_work=False),
        }

    def event_loop(self) -> "EventLoop":
        """The loop for coroutines, started when the first comes."""
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(f"telegrad-{self._agent.info.name}-asyncio")
            return self._loop

    def on_close(self) -> None:
        """Cancel what still runs."""
        if self._loop is not None:
            self._loop.close()


def serve_call(agent: Agent, request: Request) -> None:
    """The handler of `PythonCall`."""
    message = request.message
    assert type(message) is PythonCall
    result = run_call(agent, request, message)
    if type(result) is Later:
        result.give_to(functools.partial(_reply_with, agent, request), functools.partial(agent.fail, request), request)
        return
    packed = pack_for(agent, request.caller, result, request.session.main_by_value)
    del result  # so that memory that nobody else holds can go back without a copy
    agent.reply(request, PythonReply(), packed)


def _serve_cancel(request: Request) -> None:
    """The handler of `CancelCall`."""
    message = request.message
    assert type(message) is CancelCall
    if message.request_id in request.session.requests.running:  # else it has been answered
        request.session.cancellations.ask(message.request_id)


def _reply_with(agent: Agent, request: Request, result: Any) -> None:
    packed = pack_for(agent, request.caller, result, request.session.main_by_value)
    agent.reply(request, PythonReply(), packed)


class EventLoop:
    """An asyncio loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any], done: Result, failed: Failure) -> Callable[[], object]:
        """Await a coroutine and pass on what comes of it; what is returned cancels it, from any thread."""
        task: asyncio.Task[Any] | None = None

        def start() -> None:
            nonlocal task
            task = self._loop.create_task(coroutine)
            task.add_done_callback(pass_on)

        def pass_on(task: "asyncio.Task[Any]") -> None:
            try:
                done(task.result())
            except asyncio.CancelledError:
                failed(CallCancelled("the coroutine was cancelled"))
            except BaseException as error:
                failed(error)

        self._loop.call_soon_threadsafe(start)
        return lambda: self._loop.call_soon_threadsafe(lambda: task is None or task.cancel())

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
