"""The events of one worker on their way to whoever writes the timeline: records of plain values, as msgpack."""

import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from telegrad import trace
from telegrad.observe.timeline.kernels import Kernel
from telegrad.wire.messages import Observe, PropagateGradients, RpcWithAutograd, RpcWithProfiling

_NOT_SHOWN = {Observe}


class Call(msgspec.Struct, array_like=True, tag="c"):
    """A request of this worker, until its reply had come."""

    parent: tuple[int, int, int] | None
    since: float
    end: float
    thread: int
    to: int
    link: int
    request_id: int
    what: str
    message: str
    context: int
    message_id: int
    size: int
    tensors: int
    ok: bool
    in_person: bool


class Served(msgspec.Struct, array_like=True, tag="s"):
    """A request of another worker: read, begun, left by the thread that ran it, answered."""

    arrived: float
    begun: float
    returned: float
    end: float
    thread: int
    caller: int  # incarnation
    link: int
    request_id: int
    message: str
    context: int
    size: int
    tensors: int
    ok: bool


class Span(msgspec.Struct, array_like=True, tag="x"):
    """Something that this worker did."""

    parent: tuple[int, int, int] | None
    since: float
    end: float
    thread: int
    name: str
    category: str
    details: dict[str, Any]


class Mark(msgspec.Struct, array_like=True, tag="m"):
    """Something that happened."""

    when: float
    thread: int
    name: str
    category: str
    details: dict[str, Any]


AnyEvent = Call | Served | Span | Mark | Kernel


class Batch(msgspec.Struct, array_like=True):
    """What a worker recorded since it was last asked."""

    clock: float
    incarnation: int
    events: list[AnyEvent]
    threads: dict[int, str]
    lost: int


# The recorder's tuples hold their fields in order; untyped, since a tuple of any length cannot be checked.
_call: Any = Call
_served: Any = Served

encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode


def readable(raw: Iterable[trace.Event]) -> list[AnyEvent]:
    """What the recorder holds, as records; the collecting itself is left out."""
    events: list[AnyEvent] = []
    for kind, *fields in raw:
        if kind == "call":
            *head, what, message, size, tensors, ok, in_person = fields
            if type(message) not in _NOT_SHOWN:
                name, context, message_id = describe(message)
                text = what if isinstance(what, str) else what()
                events.append(_call(*head, text, name, context, message_id, size, tensors, ok, in_person))
        elif kind == "serve":
            *head, message, size, tensors, ok = fields
            if type(message) not in _NOT_SHOWN:
                name, context, _ = describe(message)
                events.append(_served(*head, name, context, size, tensors, ok))
        elif kind == "span":
            fields[-1] = _plain(fields[-1])
            events.append(Span(*fields))
        else:
            fields[-1] = _plain(fields[-1])
            events.append(Mark(*fields))
    return events


def describe(message: Any) -> tuple[str, int, int]:
    """The name of a message, the context it belongs to and the id of its Send or Recv; -1 for none."""
    if type(message) is RpcWithProfiling:
        message = message.call
    if type(message) is RpcWithAutograd:
        return type(message.call).__name__, message.metadata.context_id, message.metadata.message_id
    if type(message) is PropagateGradients:
        return "PropagateGradients", message.metadata.context_id, message.metadata.message_id
    return type(message).__name__, int(getattr(message, "context_id", -1)), -1


def _plain(details: dict[str, Any]) -> dict[str, Any]:
    return {key: value() if callable(value) else value for key, value in details.items()}


def thread_names() -> dict[int, str]:
    """The names of the threads that run now."""
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
