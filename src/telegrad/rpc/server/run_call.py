"""The call of a user's function: it runs in the thread that read it, and what it returns is the reply.

One that returns a coroutine, or is marked to return a Future, is answered when that is done; no thread waits for it.
"""

import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from types import CoroutineType
from typing import Any

import torch

from telegrad.cuda import order, reads
from telegrad.errors import CallCancelled, CallRefused, TelegradError
from telegrad.rpc.layer import Layer, Layers, Served
from telegrad.rpc.packing import discard, pack_counted, unpack_from
from telegrad.rpc.request import Request
from telegrad.rpc.server.cancellation import FirstEnd
from telegrad.rpc.server.event_loop import EventLoop, Failure, Result
from telegrad.wire.codec import NOT_FLAT, pack_flat, unpack_call
from telegrad.wire.messages import Ack, CancelCall, PythonCall, PythonRemoteCall, PythonReply

_RETURNED = PythonReply()
ASYNC_MARK = "_wrapped_async_rpc_function"  # what torch's own decorator leaves on a function, too


class CallService(Layer):
    """The layer that runs users' functions, and awaits their coroutines in an event loop of its own."""

    def __init__(self, name: str, layers: Layers) -> None:
        self._name = name
        self._layers = layers
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()  # guards the making of the loop

    def messages(self) -> Mapping[type[Any], Served]:
        """Calls, and word that nobody waits for one any more."""
        return {PythonCall: Served(self._serve), CancelCall: Served(_serve_cancel, counts_as_work=False)}

    def _serve(self, request: Request) -> None:
        result = self.run(request, request.message)  # type: ignore[arg-type] # it serves a PythonCall
        if type(result) is Later:
            result.give_to(functools.partial(self._reply_with, request), request.fail, request)
            return
        packed = pack_flat(result)
        if packed is None:
            packed = pack_counted(self._layers, request.caller, result, request.session.main_by_value)
        del result  # so that memory that nobody else holds can go back without a copy
        request.reply(_RETURNED, packed)

    def _reply_with(self, request: Request, result: Any) -> None:
        packed = pack_flat(result)
        if packed is None:
            packed = pack_counted(self._layers, request.caller, result, request.session.main_by_value)
        request.reply(_RETURNED, packed)

    def run(self, request: Request, call: PythonCall | PythonRemoteCall) -> Any:
        """Run the call of a request; its result, which nothing here holds any longer, or a `Later`."""
        frame, number = request.frame, call.function
        func: Any = None
        if number:
            functions = request.session.functions
            func = functions.found.get(number)
            if func is None:
                try:
                    func = functions.resolve(number)
                except BaseException:
                    discard(self._layers, request.caller, frame.payload, frame.take_tensors())
                    raise
        elif self._layers.plain:
            raise CallRefused("rule 'exports only': a function came by value; call exported names alone")
        tensors = request.take_tensors()
        if request.on_tensors is not None:
            try:
                tensors = request.on_tensors(tensors)
            except BaseException:
                discard(self._layers, request.caller, frame.payload, tensors)
                raise
        value = unpack_call(frame.payload, tensors)
        if value is NOT_FLAT:
            value = unpack_from(self._layers, request.caller, frame.payload, tensors)
        if number:
            args, kwargs = value
        else:
            func, args, kwargs = value
        # Nothing but the function itself may hold its arguments, so that their memory goes back as soon as it lets go.
        frame.payload = b""
        del tensors, value
        cancellations = request.session.cancellations
        if cancellations is not None:
            cancellations.check(frame.request_id)
        if request.scope is None:
            return self._returned(func, func(*args, **kwargs))
        with request.scope():
            return self._returned(func, func(*args, **kwargs))

    def _returned(self, func: Any, result: Any) -> Any:
        """What a function returned; a `Later`, made in the scope in which it ran, if the result is not there yet."""
        if isinstance(result, CoroutineType) or hasattr(func, ASYNC_MARK):
            return Later(self, func, result)
        return result

    def event_loop(self) -> EventLoop:
        """The loop for coroutines, started when the first comes."""
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(f"telegrad-{self._name}-asyncio")
            return self._loop

    def on_close(self) -> None:
        """Cancel what still runs."""
        if self._loop is not None:
            self._loop.close()


class Later:
    """Instead of a result that is not there yet: that of a coroutine, or of a function that returned a future.

    Made where the function ran, whose context variables a coroutine keeps: it calls in the context of its caller. The
    thread that runs it has other streams, which have to follow those that its arguments were made on.
    """

    __slots__ = ("_context", "_func", "_made", "_result", "_service")

    def __init__(self, service: CallService, func: Any, result: Any) -> None:
        self._service = service
        self._func = func
        self._result = result
        self._context = contextvars.copy_context()
        self._made: order.Mark | None = None
        if order.active:
            reads.finish_reading()
            if isinstance(result, CoroutineType):
                self._made = order.mark(list(inspect.getcoroutinelocals(result).values()))

    def give_to(self, done: Result, failed: Failure, request: Request) -> None:
        """Call one of the two when the result is there, from whichever thread."""
        if isinstance(self._result, CoroutineType):
            made, self._made = self._made, None
            before = None if made is None else functools.partial(order.follow, made)
            cancel = self._service.event_loop().run(self._result, self._context, done, failed, before)
            request.session.cancelling().on_ask(request.frame.request_id, cancel)
        else:
            cancel = _when_done(self._func, self._result, done, failed)
            request.session.cancelling().on_ask(request.frame.request_id, cancel)


def _when_done(func: Any, result: Any, done: Result, failed: Failure) -> Callable[[], None]:
    """Pass on what becomes of a future. What is returned has the call end without it: nobody waits any more."""
    if not isinstance(result, torch._C.Future):
        raise TelegradError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but {getattr(func, '__qualname__', func)} returned {type(result).__name__}"
        )

    first = FirstEnd()

    @first
    def finish(future: Any) -> None:
        try:
            done(future.value())
        except BaseException as error:
            failed(error)

    @first
    def cancel() -> None:
        failed(CallCancelled("the call was cancelled, or its timeout passed, before its future was done"))

    result.add_done_callback(finish)
    return cancel


def _serve_cancel(request: Request) -> None:
    """The handler of `CancelCall`."""
    message = request.message
    assert type(message) is CancelCall
    session, request_id = request.session, message.request_id
    cancellations = session.cancelling()
    if request_id in session.requests.running:
        cancellations.ask(request_id)
    if request_id not in session.requests.running:  # it has been answered, perhaps this very moment
        cancellations.forget(request_id)
    request.reply(Ack())  # a notice has none, but whoever sends it as a request is not left waiting
