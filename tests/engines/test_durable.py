"""A durable run whose workers are started again by an engine ends as one that nobody disturbed, bit for bit."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from telegrad import autograd, durable, rpc

STEPS, FOLDER, KILL = 20, Path(sys.argv[1]), sys.argv[2:]

def die(mark):
    # Each kill happens once, whoever comes by first, in whichever incarnation.
    try:
        (FOLDER / mark).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def train(first, second, kills=KILL, directory=None):
    torch.manual_seed(7)
    run = durable.Run(f"digits-{len(kills)}", every=3, seed=7, restart_timeout=60, directory=directory)
    stem = run.module(first, nn.Sequential, (nn.Linear(8, 16), nn.Dropout(0.2)))
    head = run.module(second, nn.Linear, (16, 1))
    optimizer = run.optimizer(torch.optim.Adam, [stem, head], lr=1e-2)
    for k in run.steps(STEPS):
        with run.step() as context_id:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(k))
            loss = (head(stem(x).relu()) - x.sum(1, keepdim=True)).square().mean()
            autograd.backward(context_id, [loss])
            if f"worker@{k}" in kills:
                rpc.rpc_async(first, die, (f"worker@{k}",))
            optimizer.step(context_id)
        if f"driver@{k}" in kills:
            die(f"driver@{k}")
    weights = torch.cat([p.flatten() for m in (stem, head) for p in m.state_dict().values()])
    print("WEIGHTS", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)
    run.close()

"""

LIVE = """
rpc.init_rpc()
if rpc.get_worker_info().id == 0:
    train("worker1", "worker2", directory=FOLDER / "snapshots" if os.environ.get("DISK") else None)
else:
    durable.serve()
rpc.shutdown()
"""

ON_RAY = """
from telegrad.launch.ray import ray_cluster

with ray_cluster(workers=3, resources={"CPU": 0.5}, max_restarts=3):
    train("worker1", "worker2", kills=[])  # the ranks, hence the seeds, are others than below a launcher
    train("worker1", "worker2")
"""

RUN = [sys.executable, "-m", "telegrad", "run", "-n", "3"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]


def weights_after(folder: Path, command: list[str], program: str, *kills: str, disk: bool = False) -> list[str]:
    """The digests of the weights that runs end with, whose workers are killed at these moments."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN + program)
    done = subprocess.run(
        [*command, str(script), str(folder), *kills],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "DISK": "1" if disk else ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    assert {path.name for path in folder.iterdir() if "@" in path.name} == set(kills), "not all kills happened"
    digests = [line.split("WEIGHTS ")[1].strip() for line in done.stdout.splitlines() if "WEIGHTS " in line]
    assert digests and all(len(digest) == 2 * hashlib.sha256().digest_size for digest in digests)
    return digests


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return weights_after(tmp_path_factory.mktemp("undisturbed") / "run", RUN, LIVE)


def test_telegrad_run_starts_again_who_died(tmp_path: Path, undisturbed: list[str]) -> None:
    """A worker, then the driver itself."""
    command = [*RUN, "--max-restarts", "3"]
    assert weights_after(tmp_path / "run", command, LIVE, "worker@7", "driver@13") == undisturbed


def test_torchrun_starts_all_again_and_the_state_is_on_disk(tmp_path: Path, undisturbed: list[str]) -> None:
    command = [*TORCHRUN, "--max-restarts", "3"]
    assert weights_after(tmp_path / "run", command, LIVE, "worker@7", "driver@13", disk=True) == undisturbed


@pytest.mark.long
def test_ray_starts_actors_again(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    undisturbed, killed = weights_after(tmp_path / "run", [sys.executable], ON_RAY, "worker@5", "worker@12")
    assert killed == undisturbed
