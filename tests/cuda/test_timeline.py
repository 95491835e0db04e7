"""The recorded timeline of a job has what ran on the GPU, of each worker."""

import json
from pathlib import Path

import torch

from telegrad import observe, rpc
from tests.cluster import Cluster
from tests.cuda.helpers import add, warm


def test_a_timeline_shows_the_kernels_of_both_workers(pair: Cluster, tmp_path: Path) -> None:
    warm()
    x = torch.rand(2**20, device="cuda")
    with observe.record(str(tmp_path / "step.json")):
        for _ in range(3):
            rpc.rpc_sync("worker1", add, args=(x, x + 1))
        torch.cuda.synchronize()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    tracks = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"].startswith("GPU 0")
    }
    on_gpu = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in tracks]
    assert len({pid for pid, _ in tracks}) == 2, "of one worker only"
    assert sum("copy_and_tell" in event["name"] for event in on_gpu) >= 6
