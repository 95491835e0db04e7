"""Workers as Ray actors: placed, killed, started again, and joined by an existing program."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import wait_until

pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ENVIRONMENT = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

HEAD = """
import json, os, random, sys, time
import ray, torch
from telegrad import autograd, rpc
from telegrad.errors import TelegradError, WorkerDied
from telegrad.launch.ray import join, ray_cluster
from telegrad.observe.attach import attached

def who():
    return rpc.get_worker_info().name, os.getpid()

report = {}
"""

TAIL = """
print("REPORT", json.dumps(report))
"""

RESTART = """
with ray_cluster(workers=2, resources={"CPU": 0.5}, max_restarts=2) as cluster:
    report["who"] = [rpc.rpc_sync(name, who)[0] for name in cluster.names]
    report["between"] = rpc.rpc_sync("worker0", rpc.rpc_sync, ("worker1", who))[0]
    report["by handle"] = ray.get(cluster.actors["worker1"].run.remote(who))[0]
    with attached(str(os.getpid())) as observer:
        report["observed"] = [member.name for member in observer.directory.members()]
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    rref.to_here()
    before = rpc.rpc_sync("worker1", who)[1]
    cluster.kill("worker1")
    began = time.monotonic()
    cluster.wait_for("worker1")
    report["seconds"] = time.monotonic() - began
    report["another process"] = rpc.rpc_sync("worker1", who)[1] != before
    try:
        rref.to_here()
    except WorkerDied as error:
        report["lost"] = error.worker
    w = torch.ones(2, 2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mm, args=(w, w)).sum()])
        report["gradient"] = autograd.get_gradients(context_id)[w].tolist()
    try:
        rpc.rpc_sync("worker0", int, args=("x",))
    except ValueError as error:
        report["error"] = str(error).splitlines()[0]
    report["again"] = rpc.rpc_sync("worker0", rpc.rpc_sync, ("worker1", who))[0]
"""

JOIN = """
ray.init(num_cpus=2, logging_level="WARNING")

@ray.remote(num_cpus=0.1)
class Trainer:
    def __init__(self, name):
        join(name)
    def ask(self, name):
        return rpc.rpc_sync(name, who)[0]
    def leave(self):
        rpc.shutdown()

a, b = Trainer.remote("a"), Trainer.remote("b")
ray.get([a.__ray_ready__.remote(), b.__ray_ready__.remote()])
report["answers"] = ray.get([a.ask.remote("b"), b.ask.remote("a")])
ray.get([a.leave.remote(), b.leave.remote()])
ray.shutdown()
"""

# The script is no part of the Ray cluster until it connects.
REMOTE = """
with ray_cluster(workers=2, resources={"CPU": 0.5}, address=sys.argv[1]) as cluster:
    report["who"] = [rpc.rpc_sync(name, who)[0] for name in cluster.names]
    report["between"] = rpc.rpc_sync("worker0", rpc.rpc_sync, ("worker1", who))[0]
"""

# Each step is checked against the same step in one process; what fails must name the actor, and steps go on soon.
CHAOS = """
kills = int(sys.argv[1])
random.seed(1)
WORKERS = 2
def forward(x, w):
    return torch.tanh(x @ w)
def step(x, w):
    with autograd.context() as context_id:
        h = rpc.rpc_sync("worker0", forward, args=(x, w), timeout=20)
        y = rpc.rpc_sync("worker1", forward, args=(h, w), timeout=20)
        autograd.backward(context_id, [y.sum()])
        return autograd.get_gradients(context_id)[w]
def expected(x, w):
    w = w.detach().requires_grad_()
    forward(forward(x, w), w).sum().backward()
    return w.grad
with ray_cluster(workers=WORKERS, resources={"CPU": 0.5}, max_restarts=-1) as cluster:
    report["right"] = report["named"] = 0
    report["slowest"] = 0.0
    for kill in range(kills):
        for _ in range(random.randint(1, 5)):
            x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
            assert torch.allclose(step(x, w), expected(x, w), atol=1e-5)
            report["right"] += 1
        victim = random.choice(cluster.names)
        ray.kill(cluster.actors[victim], no_restart=False)
        began = time.monotonic()
        while True:
            try:
                assert torch.allclose(step(x, w), expected(x, w), atol=1e-5)
                report["right"] += 1
                if report.get("failed") or time.monotonic() - began > 0.5:
                    break
            except (TelegradError, TimeoutError) as error:
                assert any(name in str(error) for name in cluster.names), error
                report["named"] += 1
                report["failed"] = True
                time.sleep(0.05)
            assert time.monotonic() - began < 60
        report["failed"] = False
        report["slowest"] = max(report["slowest"], time.monotonic() - began)
"""


def run(program: str, tmp_path: Path, *arguments: str, seconds: float = 220) -> dict[str, object]:
    script = tmp_path / "program.py"
    script.write_text(HEAD + program + TAIL)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    report: dict[str, object] = json.loads(line.removeprefix("REPORT "))
    return report


def test_an_actor_is_killed_and_comes_back_under_its_name(tmp_path: Path) -> None:
    report = run(RESTART, tmp_path)
    seconds = report.pop("seconds")
    assert isinstance(seconds, float) and seconds < 30
    assert report == {
        "who": ["worker0", "worker1"],
        "between": "worker1",
        "observed": ["worker0", "worker1", "driver"],
        "by handle": "worker1",
        "another process": True,
        "lost": "worker1",
        "gradient": [[4.0, 4.0], [4.0, 4.0]],
        "error": "invalid literal for int() with base 10: 'x'",
        "again": "worker1",
    }


def test_a_program_of_ones_own_joins(tmp_path: Path) -> None:
    assert run(JOIN, tmp_path) == {"answers": ["b", "a"]}


@pytest.mark.long
def test_on_a_ray_that_runs_already(tmp_path: Path) -> None:
    """Started by `ray start`, as on the nodes of a cluster: the job comes and goes, Ray stays."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = [*ray, "start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
    # Not below tmp_path: the path of a Unix socket has at most 107 characters, and Ray adds many of them.
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [*head, "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        ) as node,
    ):
        try:
            check = [*ray, "health-check", f"--address=127.0.0.1:{port}"]
            wait_until(lambda: subprocess.run(check, env=ENVIRONMENT, check=False).returncode == 0, 60)
            report = run(REMOTE, tmp_path, f"127.0.0.1:{port}")
            assert report == {"who": ["worker0", "worker1"], "between": "worker1"}
            assert node.poll() is None and subprocess.run(check, env=ENVIRONMENT, check=False).returncode == 0
        finally:
            os.killpg(node.pid, signal.SIGTERM)


@pytest.mark.long
def test_training_goes_on_while_actors_are_killed(tmp_path: Path) -> None:
    kills = int(os.environ.get("TELEGRAD_RAY_KILLS", "30"))
    report = run(CHAOS, tmp_path, str(kills), seconds=160 + 20 * kills)
    right = report["right"]
    assert isinstance(right, int) and right >= 2 * kills
    slowest = report["slowest"]
    # Ten seconds where there is a core for it: most of it is the new process importing torch.
    limit = 10 if os.getloadavg()[0] < (os.cpu_count() or 1) else 60
    assert isinstance(slowest, float) and slowest < limit
    print(report)


@pytest.mark.parametrize(
    ("what", "ends"),
    [
        ("parameter-server", "largest error"),
        pytest.param("pipeline", "last loss", marks=pytest.mark.long),
    ],
)
def test_the_examples_survive_a_kill(what: str, ends: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "on_ray.py"
    done = subprocess.run(
        [sys.executable, str(script), what, "--steps", "40", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "lost: worker 'worker1'" in done.stdout and "worker1 is back" in done.stdout and ends in done.stdout
