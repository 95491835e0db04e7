"""The events of one worker on their way to whoever writes the timeline: records of plain values, as msgpack."""

import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from telegrad import trace
from telegrad.observe.events.kernels import Kernel
from telegrad.transport.device.channel import is_of_device
from telegrad.wire.frames import INLINE, FrameKind
from telegrad.wire.messages import Observe, PropagateGradients, PythonCall, RpcWithAutograd, RpcWithProfiling

_NOT_SHOWN = {Observe}
_REPLY = int(FrameKind.REPLY)
_NO_WAYS: dict[str, int] = {}


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
    ways: dict[str, int]  # bytes of the reply's tensors, by how they came; see `ways`


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
    ways: dict[str, int]  # bytes of the request's tensors, by how they came


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
    """What a worker recorded since it was last asked. The events are read at the end: the job runs meanwhile."""

    incarnation: int
    count: int
    events: bytes  # encoded
    threads: dict[int, str]
    lost: int


encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode
decode_events = msgspec.msgpack.Decoder(list[AnyEvent]).decode


def readable(raw: Iterable[trace.Event | Kernel]) -> list[AnyEvent]:
    """What the recorder holds, as records; the collecting itself is left out."""
    events: list[AnyEvent] = []
    texts: dict[Any, str] = {}  # what was called, by link and the number that stands for the function there
    for event in raw:
        if isinstance(event, Kernel):
            events.append(event)
            continue
        kind = event[0]
        if kind == "call":
            _, asked, since, end, (link, number, what), reply, came, in_person = event
            parent, thread, message, size, count = asked
            if type(message) not in _NOT_SHOWN:
                name, context, message_id = describe(message)
                of = (link, message.function) if name == "PythonCall" and context < 0 and message.function else None
                text = texts.get(of)
                if text is None:
                    text = what if type(what) is str else what()
                    if of is not None:
                        texts[of] = text
                events.append(
                    Call(
                        _key(parent),
                        since,
                        end,
                        thread,
                        link.member.worker_id,
                        link.number,
                        number,
                        text,
                        name,
                        context,
                        message_id,
                        size,
                        count,
                        reply == _REPLY,
                        in_person,
                        ways(came, link.current) if came else _NO_WAYS,
                    )
                )
        elif kind == "serve":
            _, (arrived, begun, returned, thread, message, came), end, session, number, size, count, reply = event
            if type(message) not in _NOT_SHOWN:
                name, context, _ = describe(message)
                events.append(
                    Served(
                        arrived,
                        begun,
                        returned or end,
                        end,
                        thread,
                        session.member.incarnation,
                        session.number,
                        number,
                        name,
                        context,
                        size,
                        count,
                        reply == _REPLY,
                        ways(came, session.connection) if came else _NO_WAYS,
                    )
                )
        elif kind == "span":
            _, parent, since, end, thread, name, category, details = event
            events.append(Span(_key(parent), since, end, thread, name, category, _plain(details)))
        else:
            _, when, thread, name, category, details = event
            events.append(Mark(when, thread, name, category, _plain(details)))
    return events


def _key(parent: trace.Key | None) -> tuple[int, int, int] | None:
    """A request by numbers that all workers know."""
    if parent is None:
        return None
    session, request_id = parent
    return (session.member.incarnation, session.number, request_id)


def ways(segments: Iterable[Any], connection: Any) -> dict[str, int]:
    """Bytes of tensors by how they came: through the socket, copied once into shared memory, given back in the memory
    that this worker had lent, or in memory of the GPU. Tensors below a few kB travel within the message itself."""
    socket = "in the message" if connection is None else f"copied through {connection.stream.kind}"
    found: dict[str, int] = {}
    for segment in segments:
        if segment.block == INLINE:
            way = socket
        elif is_of_device(segment.block):
            way = "shared on the GPU"
        else:
            way = "given back" if segment.block < INLINE else "copied into shared memory"
        found[way] = found.get(way, 0) + segment.nbytes
    return found


def describe(message: Any) -> tuple[str, int, int]:
    """The name of a message, the context it belongs to and the id of its Send or Recv; -1 for none."""
    kind = type(message)
    if kind is PythonCall:  # as most are
        return "PythonCall", -1, -1
    if kind is RpcWithProfiling:
        message, kind = message.call, type(message.call)
    if kind is RpcWithAutograd:
        return type(message.call).__name__, message.metadata.context_id, message.metadata.message_id
    if kind is PropagateGradients:
        return "PropagateGradients", message.metadata.context_id, message.metadata.message_id
    return kind.__name__, int(getattr(message, "context_id", -1)), -1


def _plain(details: dict[str, Any]) -> dict[str, Any]:
    return {key: value() if callable(value) else value for key, value in details.items()}


def thread_names() -> dict[int, str]:
    """The names of the threads that run now."""
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
