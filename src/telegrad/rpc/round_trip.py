"""A call on its way: what is sent for a function and its arguments, and the value that comes back."""

from collections.abc import Callable
from typing import Any

import torch

from telegrad.rpc.agent import Agent
from telegrad.rpc.client.function_table import sendable
from telegrad.rpc.client.link import NOTHING, Link
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.client.replies import reply_frame
from telegrad.rpc.futures import Future
from telegrad.rpc.layer import Around, CallProfiler, OnReply
from telegrad.rpc.options import UNSET_RPC_TIMEOUT
from telegrad.rpc.packing import discard, pack_counted, unpack_from
from telegrad.rpc.trust.exports import exported_name
from telegrad.wire.codec import NOT_FLAT, Packed, pack_call, pack_plain, unpack_flat
from telegrad.wire.frames import REPLY
from telegrad.wire.messages import AnyMessage, PythonCall

Complete = Callable[[Slot], None]  # what to do when the reply has come or will not, in whichever thread finds out
_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined] # torch declares no type


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
        (number, _, what, _), carried, definition, *_ = defined
        message = (make or PythonCall)(number, carried)
    if future is not None:
        what = future.what = future.what or what
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
        what=subject or what,
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
    return pack_counted(agent.layers, link.member, value, link.main_by_value, [])


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
        slot = link.send(
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
    if on_reply is not None:
        on_reply.sent()
    return slot


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
