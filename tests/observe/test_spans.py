"""Calls as OpenTelemetry spans: a remote call is a child of the span it was made in, across workers."""

import gc

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.observe import trace_calls
from tests.cluster import cluster
from tests.waiting import wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace")


def use_sdk():
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    global exporter  # noqa: PLW0603 - kept for `spans`, in whichever process
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def spans():
    return [
        (
            span.name,
            span.kind.name,
            f"{span.context.trace_id:x}",
            span.context.span_id,
            None if span.parent is None else span.parent.span_id,
            dict(span.attributes or {}),
            span.status.status_code.name,
        )
        for span in exporter.get_finished_spans()
    ]


def await_spans(worker, *names):
    """The spans that have ended on a worker, once those of that name have: a thread may hold a call a moment longer."""
    wait_until(lambda: gc.collect() >= 0 and set(names) <= {span[0] for span in rpc.rpc_sync(worker, spans)})
    return rpc.rpc_sync(worker, spans)


def outer(x):
    return rpc.rpc_sync("worker2", inner, args=(x,))


def inner(x):
    return x * 2


def refuse():
    raise ValueError("no")


@pytest.mark.slow
def test_a_remote_call_is_a_child_span():
    with cluster(3):
        for name in ("worker0", "worker1", "worker2"):
            rpc.rpc_sync(name, use_sdk) if name != "worker0" else use_sdk()
        trace_calls()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", outer, args=(torch.ones(1, requires_grad=True),))
            autograd.backward(context_id, [y])
        with pytest.raises(ValueError, match="no"):
            rpc.rpc_sync("worker1", refuse)
        here = await_spans("worker0", "outer", "refuse")
        there = await_spans("worker1", "outer", "inner")
        further = await_spans("worker2", "inner")
    (call,) = [span for span in here if span[0] == "outer"]
    assert call[1] == "CLIENT" and call[4] is None
    assert call[5] == {"rpc.system.name": "telegrad", "rpc.method": "outer", "server.address": "worker1"}
    (served,) = [span for span in there if span[0] == "outer"]
    assert (served[1], served[2], served[4]) == ("SERVER", call[2], call[3])
    (nested,) = [span for span in there if span[0] == "inner"]
    assert (nested[1], nested[2], nested[4]) == ("CLIENT", call[2], served[3])
    (last,) = [span for span in further if span[0] == "inner"]
    assert (last[1], last[2], last[4]) == ("SERVER", call[2], nested[3])
    (failed,) = [span for span in here if span[0] == "refuse"]
    assert failed[6] == "ERROR"
