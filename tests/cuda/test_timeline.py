"""A timeline has what the GPUs did: kernels of all workers, on tracks of their own, by the same clock as the calls."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import observe, rpc
from tests.cluster import Cluster
from tests.observe.trace_file import check

SLACK_US = 3000.0  # between the profiler's clock and ours


def multiply(size: int, times: int) -> None:
    x = torch.ones(size, size, device="cuda")
    for _ in range(times):
        x = (x @ x).clamp(max=1.0)
    torch.cuda.synchronize()


def slices(timeline: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [e for e in timeline["traceEvents"] if e["ph"] == "X" and e["cat"] == category]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_kernels_lie_within_the_call_that_waited_for_them(pair: Cluster, tmp_path: Path) -> None:
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        pytest.skip("this torch has no CUPTI")
    multiply(64, 1)
    rpc.rpc_sync("worker1", multiply, args=(64, 1))  # both have used CUDA before the recording begins
    path = tmp_path / "kernels.json"
    with observe.record(path):
        rpc.rpc_sync("worker1", multiply, args=(512, 5))
        multiply(256, 3)
    timeline = json.loads(path.read_text())
    check(timeline)
    workers = {e["pid"]: e["args"]["name"].split()[0] for e in timeline["traceEvents"] if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name"}
    kernels = slices(timeline, "kernel")
    assert {workers[e["pid"]] for e in kernels} == {"worker0", "worker1"}
    assert all(tracks[e["pid"], e["tid"]].startswith("GPU 0, stream") for e in kernels)
    (served,) = [e for e in slices(timeline, "run") if e["name"] == "multiply"]
    theirs = [e for e in kernels if e["pid"] == served["pid"]]
    assert len(theirs) >= 10  # five products and five clamps
    for kernel in theirs:
        assert kernel["ts"] >= served["ts"] - SLACK_US
        assert kernel["ts"] + kernel["dur"] <= served["ts"] + served["dur"] + SLACK_US
    busy = sum(kernel["dur"] for kernel in theirs)
    assert 0 < busy <= served["dur"] + SLACK_US


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_recording_can_leave_the_profiler_to_the_program(pair: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with observe.record(path, kernels=False):
        multiply(64, 1)
    assert not slices(json.loads(path.read_text()), "kernel")
