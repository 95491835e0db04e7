"""A profile taken on one worker holds what its calls did on others, nested ones and the backward pass included."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from telegrad import autograd, rpc
from tests.cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def job():
    with cluster(3) as made:
        yield made


weight = torch.ones(2, 2, requires_grad=True)
SLACK = 20_000  # microseconds by which the clocks of two profilers may differ that were set on a busy machine


def outer(x):
    with record_function("my block"):
        return rpc.rpc_sync("worker2", inner, args=(x,)) + 1


def inner(x):
    return torch.mm(x, weight)


def test_events_of_nested_calls_are_in_the_profile():
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        rpc.rpc_sync("worker1", outer, args=(torch.ones(2, 2),))
    events = prof.events()
    assert events is not None
    remote = {event.name: event for event in events if event.is_remote}
    first = "rpc_sync#outer(worker0 -> worker1)"
    second = f"{first}#remote_op: rpc_sync#inner(worker1 -> worker2)"
    assert remote[f"{first}#remote_op: my block"].node_id == 1
    assert remote[f"{first}#remote_op: aten::add"].node_id == 1
    assert remote[f"{second}#remote_op: aten::mm"].node_id == 2
    assert remote[f"{second}#remote_op: aten::mm"].input_shapes[:2] == [[2, 2], [2, 2]]
    (call,) = [event for event in events if event.name == first]
    assert call.node_id == 0
    for event in remote.values():
        assert call.time_range.start - SLACK <= event.time_range.start
        assert event.time_range.end <= call.time_range.end + SLACK
    averages = {event.key: event for event in prof.key_averages()}
    assert averages[f"{second}#remote_op: aten::mm"].count == 1
    assert "#remote_op: aten::mm" in prof.key_averages().table(max_name_column_width=200)


def test_names_are_those_of_torch():
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        rpc.rpc_async("worker1", torch.add, args=(torch.ones(1), 1)).wait()
        rpc.remote("worker1", torch.add, args=(torch.ones(1), 1))._get_profiling_future().wait()
    events = prof.events()
    assert events is not None
    names = [event.name for event in events]
    for how in ("sync", "async", "remote"):
        assert names.count(f"rpc_{how}#aten::add(worker0 -> worker1)") == 1
        assert names.count(f"rpc_{how}#aten::add(worker0 -> worker1)#remote_op: aten::add") == 1


def test_the_exported_trace_has_them_with_their_workers(tmp_path: Path):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        rpc.rpc_sync("worker1", outer, args=(torch.ones(2, 2),))
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    workers = {event["pid"]: event["name"] for event in events if event.get("cat") == "remote_op"}
    assert workers.keys() == {"worker 1", "worker 2"}


def test_the_backward_pass_is_profiled_on_all_its_workers():
    x = torch.ones(2, 2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", outer, args=(x,)).sum()
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            autograd.backward(context_id, [loss])
        gradient = autograd.get_gradients(context_id)[x]
    assert torch.equal(gradient, torch.full((2, 2), 2.0))
    events = prof.events()
    assert events is not None
    remote = [(event.node_id, event.name.rpartition("#remote_op: ")[2]) for event in events if event.is_remote]
    assert (2, "aten::mm") in remote
    assert any(node == 1 and "AddBackward0" in name for node, name in remote)


def test_an_error_under_a_profiler_is_the_users_and_the_next_call_works():
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with pytest.raises(RuntimeError, match="mat1"):
            rpc.rpc_sync("worker1", torch.mm, args=(torch.ones(2, 3), torch.ones(2, 3)))
        rpc.rpc_sync("worker1", torch.mm, args=(torch.ones(2, 2), torch.ones(2, 2)))
    events = prof.events()
    assert events is not None
    assert any(event.is_remote and event.name.endswith("aten::mm") for event in events)


def test_a_call_outside_any_profiler_is_not_wrapped():
    assert torch.equal(rpc.rpc_sync("worker1", inner, args=(torch.ones(1, 2),)), torch.full((1, 2), 2.0))
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.add(torch.ones(1), 1)
    events = prof.events()
    assert events is not None
    assert not any(event.is_remote for event in events)
