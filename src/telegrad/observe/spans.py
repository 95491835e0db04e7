"""OpenTelemetry, through its API alone: each call is a span, and what it runs elsewhere a child of it.

`trace_calls()` puts a layer on the agent. If the process has an SDK, it makes a client span for each call going out,
sends the trace context along with it (`RpcWithTrace`: a `traceparent`, as W3C defines it), and makes a server span
around each that comes with one. Names and attributes follow the semantic conventions for RPC.
"""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from telegrad.errors import TelegradError
from telegrad.ids import WorkerId
from telegrad.observe.profiling.remote import ScopedRequest
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.function_table import name_of
from telegrad.rpc.current import require_agent
from telegrad.rpc.layer import Layer, OnReply
from telegrad.rpc.request import Request
from telegrad.rpc.round_trip import start_call
from telegrad.wire.messages import AnyMessage, RpcWithTrace

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import SpanKind, StatusCode
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise TelegradError(
        f"tracing calls needs OpenTelemetry's API ({error}): pip install 'telegrad[observe]'"
    ) from error


class CallTracing(Layer):
    """Spans for the calls of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._tracer = trace.get_tracer("telegrad")

    def wrap_call(self, to: WorkerId, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, OnReply] | None:
        """Begin the span of a call, and send its context along."""
        method = _called()
        callee = self._agent.directory.by_id(to)
        span = self._tracer.start_span(method, kind=SpanKind.CLIENT, attributes=_attributes(method))
        if not span.get_span_context().is_valid:
            return None  # no SDK: nobody would see it
        span.set_attribute("server.address", str(to) if callee is None else callee.name)
        if self._agent.layers.plain:
            return message, _Ending(span)  # what this worker is doing is no concern of one it does not trust
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        return RpcWithTrace(method, tuple(carrier.items()), message), _Ending(span)  # type: ignore[arg-type] # a call

    def serve(self, request: Request, message: RpcWithTrace) -> None:
        """Serve a call that came with a trace context, within a span."""
        caller = request.caller.name
        request.session.serve(ScopedRequest(request, partial(self._span, message, caller)))

    @contextlib.contextmanager
    def _span(self, message: RpcWithTrace, caller: str) -> Iterator[None]:
        parent = propagate.extract(dict(message.carrier))
        attributes = {**_attributes(message.method), "client.address": caller}
        with self._tracer.start_as_current_span(message.method, parent, SpanKind.SERVER, attributes):
            yield


class _Ending:
    """Ends the span of a call: with its reply, or when the call lets go of this, if there is none or it is an error."""

    inner: OnReply | None = None  # that of the layer below, which has wrapped the call before

    def __init__(self, span: Any) -> None:
        self._span = span

    def __call__(self, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, list[Tensor]]:
        span, self._span = self._span, None
        span.end()
        return (message, tensors) if self.inner is None else self.inner(message, tensors)

    def sent(self) -> None:
        """The call has left."""
        if self.inner is not None:
            self.inner.sent()

    def unsent(self) -> None:
        """The call did not leave."""
        if self.inner is not None:
            self.inner.unsent()

    def __del__(self) -> None:
        if self._span is not None:
            self._span.set_status(StatusCode.ERROR)
            self._span.end()


def _attributes(method: str) -> dict[str, str]:
    return {"rpc.system.name": "telegrad", "rpc.method": method}


def _called() -> str:
    """What is called, in the frame that starts the call: the message that is wrapped has no name any more."""
    frame = sys._getframe(1)
    for _ in range(5):
        if frame.f_code is _START_CALL:
            return name_of(frame.f_locals["func"])
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "call"


_START_CALL = start_call.__code__


def trace_calls() -> None:
    """Make OpenTelemetry spans of the calls that this worker makes and serves, from now on.

    Only the API is used: what becomes of the spans is up to the SDK that the program has set up. Without one no span is
    made. Workers that are called begin to trace with the first such call, if OpenTelemetry is installed there.

    Examples:
        >>> telegrad.observe.trace_calls()
        >>> rpc.rpc_sync("worker1", abs, (-1,))
        1
    """
    tracing_of(require_agent())


def tracing_of(agent: Agent) -> CallTracing:
    """The layer that traces; put on the agent if it is not there yet."""
    found = agent.find_layer(CallTracing)
    if found is None:
        found = CallTracing(agent)
        agent.install(found)
    return found
