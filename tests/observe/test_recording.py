"""A recorded step of four workers, against what was executed."""

import asyncio
import json
import logging
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import telegrad
from telegrad import autograd, observe, rpc, trace
from telegrad.errors import WorkerDied
from telegrad.ids import WorkerId, draw_incarnation
from telegrad.observe.events.records import ways
from telegrad.observe.service import Observation, observation_of
from telegrad.optim import DistributedOptimizer
from telegrad.rpc.current import require_agent
from telegrad.rpc.workers import Member
from telegrad.transport.device.channel import FIRST_NAME
from telegrad.wire.frames import INLINE, SegmentSpec, returned
from tests.cluster import cluster
from tests.observe.trace_file import check
from tests.waiting import wait_until

weight = torch.ones(2, 2, requires_grad=True)


def leaf(x):
    return x @ weight


def branch(x):
    futures = [rpc.rpc_async(f"worker{n}", leaf, args=(x,)) for n in (2, 3)]
    return sum(future.wait() for future in futures) + rpc.rpc_sync("worker3", leaf, args=(x,))


def twice(x):
    return torch.cat((x, x))


async def later(x):
    await asyncio.sleep(0.2)  # long enough to be waited for
    return x + 1


def own_weight():
    return rpc.RRef(weight)


def step() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", branch, args=(x,))
        z = rpc.rpc_async("worker2", later, args=(y,))
        autograd.backward(context_id, [z.wait().sum()])
        optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.rpc_sync("worker3", own_weight)], lr=0.1)
        optimizer.step(context_id)


def slices(timeline: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [e for e in timeline["traceEvents"] if e["ph"] == "X" and e["cat"] == category]


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path):
    with cluster(1), pytest.raises(FileNotFoundError), observe.record(tmp_path / "nowhere" / "step.json"):
        pytest.fail("the block was entered")
    assert trace.recorder is None


@pytest.mark.slow
def test_a_step_is_recorded_as_it_was_executed(tmp_path: Path):
    path = tmp_path / "step.json"
    with cluster(4) as job:
        step()
        with observe.record(path):
            step()
            rpc.rpc_sync("worker1", twice, args=(torch.ones(100_000),))
    assert trace.recorder is None
    timeline = json.loads(path.read_text())
    check(timeline)
    workers = {e["pid"]: e["args"]["name"].split()[0] for e in timeline["traceEvents"] if e["name"] == "process_name"}
    assert sorted(workers.values()) == job.names
    calls = [e for e in slices(timeline, "call") if e["args"]["message"] in ("PythonCall", "PythonRemoteCall")]
    # Every call of the program, once, from the right worker to the right one.
    asked = Counter((workers[e["pid"]], e["name"]) for e in calls if "leaf" in e["name"] or "later" in e["name"])
    assert asked == {
        ("worker1", "leaf → worker2"): 1,
        ("worker1", "leaf → worker3"): 2,
        ("worker0", "later → worker2"): 1,
    }
    run = Counter((workers[e["pid"]], e["name"]) for e in slices(timeline, "forward"))
    assert run["worker1", "branch"] == 1
    assert (run["worker2", "leaf"], run["worker3", "leaf"]) == (1, 2)
    # Parents: the leaves were called by the code of `branch`, and `branch` by nobody's.
    (branch_call,) = [e for e in calls if e["name"] == "branch → worker1"]
    assert "parent" not in branch_call["args"]
    arrow = next(e["id"] for e in timeline["traceEvents"] if e["ph"] == "s" and e["ts"] == branch_call["ts"])
    assert [e["args"].get("parent") for e in calls if "leaf" in e["name"]] == [arrow] * 3
    # Times: what was served lies within its call, whoever's clock said so.
    for call in [*calls, *slices(timeline, "gradient")]:
        assert all(call["args"].get(part, 0) >= 0 for part in ("send_us", "queue_us", "run_us", "reply_us")), call
    # Tensors by how they came: one copy into shared memory each way.
    (large,) = [e for e in calls if e["name"] == "twice → worker1"]
    assert large["args"]["tensor_bytes"] == {"copied into shared memory": 400_000}
    assert large["args"]["reply_tensor_bytes"] == {"copied into shared memory": 800_000}
    # Bytes and tensors, the pass, its regions on all workers, waits and steps.
    assert branch_call["args"]["tensors"] == 1 and branch_call["args"]["bytes"] >= 8
    assert Counter(e["name"] for e in slices(timeline, "backward"))["backward"] == 1
    assert {workers[e["pid"]] for e in slices(timeline, "backward") if "region" in e["name"]} == set(job.names)
    assert any("worker2" in e["args"]["what"] for e in slices(timeline, "wait"))
    assert [(workers[e["pid"]], e["name"]) for e in slices(timeline, "optimizer")] == [("worker3", "SGD.step")]
    # Those of the root at least: others are answered lazily, on a busy machine perhaps after the end of the recording.
    gradients = {e["id"] for e in timeline["traceEvents"] if e["ph"] == "s" and e["cat"] == "gradient"}
    assert len(gradients) >= 3
    assert all(clock["error_us"] < 2_000_000 for clock in timeline["otherData"]["clocks"].values())


@pytest.mark.slow
def test_a_worker_that_dies_loses_only_its_last_events(tmp_path: Path):
    path = tmp_path / "death.json"
    with cluster(3) as job, observe.record(path) as recording:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        rpc.rpc_sync("worker2", torch.add, args=(torch.ones(1), 1))
        wait_until(lambda: recording.collected("worker1") and recording.collected("worker2"))
        job.kill("worker1")
        with pytest.raises(WorkerDied):
            rpc.rpc_sync("worker1", time.sleep, args=(0,))
        wait_until(lambda: observation_of(require_agent()).recent)  # the caller may know before the others are told
    timeline = json.loads(path.read_text())
    check(timeline)
    served = {e["pid"] for e in slices(timeline, "run")}
    assert len(served) == 2
    assert any(e["ph"] == "i" and "worker1 is gone" in e["name"] for e in timeline["traceEvents"])


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_that_came_back_is_marked_and_recorded(tmp_path: Path):
    path = tmp_path / "back.json"
    with telegrad.local_cluster(workers=2, restart=True) as job, observe.record(path) as recording:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        wait_until(lambda: recording.collected("worker1"))
        before = recording.collected("worker1")
        job.kill("worker1")

        def answers() -> bool:
            try:
                return bool(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1), timeout=2) is not None)
            except (WorkerDied, TimeoutError):
                return False

        wait_until(answers, 50)
        wait_until(lambda: answers() and recording.collected("worker1") > before, 60)
    timeline = json.loads(path.read_text())
    check(timeline)
    marks = {e["name"] for e in timeline["traceEvents"] if e["ph"] == "i"}
    assert {"worker1 is gone", "worker1 was started again"} <= marks
    names = [e["args"]["name"].split()[0] for e in timeline["traceEvents"] if e["name"] == "process_name"]
    assert names.count("worker1") == 2


def test_bytes_of_tensors_by_how_they_came():
    over_tcp = SimpleNamespace(stream=SimpleNamespace(kind="tcp"))
    segments = [
        SegmentSpec(5, INLINE, 0),
        SegmentSpec(7, 3, 0),
        SegmentSpec(11, returned(2), 0),
        SegmentSpec(2, INLINE, 5),
    ]
    assert ways(segments, over_tcp) == {"copied through tcp": 7, "copied into shared memory": 7, "given back": 11}
    assert ways([SegmentSpec(9, FIRST_NAME, 0)], None) == {"shared on the GPU": 9}


def test_one_that_comes_back_is_noted():
    known = Member("w", WorkerId(1), draw_incarnation(0), (), 1)
    agent = SimpleNamespace(directory=SimpleNamespace(known=lambda _: known), info=SimpleNamespace(name="me"))
    observation = Observation(agent)  # type: ignore[arg-type] # all that it asks of one
    back = msgspec.structs.replace(known, incarnation=draw_incarnation(1))
    assert observation.on_news([known]) == [known] and not observation.recent
    observation.on_news([msgspec.structs.replace(back, leaving=True)])
    assert not observation.recent
    observation.on_news([back])
    assert [(kind, text) for _, kind, text in observation.recent] == [("restart", "w was started again")]


def test_there_is_a_limit_to_what_is_kept():
    recorder = trace.Recorder(capacity=3)
    for number in range(5):
        recorder.mark(f"event {number}", "test")
    assert len(recorder) == 3 and recorder.lost == 2
    assert [event[3] for event in recorder.drain()] == ["event 0", "event 1", "event 2"]
    assert len(recorder) == 0


@pytest.mark.slow
def test_each_call_is_a_line_of_the_log(caplog):
    logging.getLogger("telegrad.calls").setLevel(logging.DEBUG)
    try:
        with cluster(2), caplog.at_level(logging.DEBUG, logger="telegrad.calls"):
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
            wait_until(lambda: any("add() on worker 'worker1' returned" in r.getMessage() for r in caplog.records))
        assert all(r.getMessage().startswith("worker0: ") for r in caplog.records if r.name == "telegrad.calls")
    finally:
        logging.getLogger("telegrad.calls").setLevel(logging.NOTSET)
    assert trace.recorder is None
