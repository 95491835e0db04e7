"""Slurm on one machine, from Debian's packages: `srun` starts the workers, and init_rpc() finds the rest by itself."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={ctld}
SlurmdPort={d}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""

SCRIPT = """
from telegrad import rpc

def who():
    return rpc.get_worker_info().name

rpc.init_rpc()
if rpc.get_worker_info().id == 0:
    print("answers", *[rpc.rpc_sync(f"worker{rank}", who) for rank in range(4)])
rpc.shutdown(timeout=30)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm of our own. Skips, with the reason, where it cannot be had."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)} (Debian: slurm-wlm and munge)")
    if os.geteuid() != 0:
        pytest.skip("needs root to start slurmd")
    host = socket.gethostname().partition(".")[0]
    try:
        socket.gethostbyname(host)
    except OSError:
        pytest.skip(f"this machine's own name {host!r} cannot be resolved")
    munge = tmp_path / "munge"
    munge.mkdir(mode=0o700)
    for folder in ("state", "spool"):
        (tmp_path / folder).mkdir()
    (munge / "key").write_bytes(os.urandom(64))
    (munge / "key").chmod(0o600)
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(host=host, folder=tmp_path, ctld=free_port(), d=free_port()))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    logs = (tmp_path / "daemons.log").open("w")
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        ],
        ["slurmctld", "-D", "-f", str(configuration)],
        ["slurmd", "-D", "-f", str(configuration), "-N", host],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            started.append(subprocess.Popen(command, env=environment, stdout=logs, stderr=logs))
            time.sleep(0.5)
        deadline = time.monotonic() + 40
        while True:
            state = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False
            ).stdout.strip()
            if state == "idle":
                break
            if time.monotonic() > deadline or any(each.poll() is not None for each in started):
                said = (tmp_path / "daemons.log").read_text()[-1500:]
                pytest.skip(f"Slurm does not start here: its node is {state or 'unknown'!r}. {said}")
            time.sleep(0.2)
        yield environment
    finally:
        for each in reversed(started):
            each.terminate()
        for each in reversed(started):
            try:
                each.wait(5)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
        logs.close()


def test_srun_needs_no_wrapper(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        ["srun", "-n", "4", sys.executable, str(script)],
        env={**slurm, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers worker0 worker1 worker2 worker3" in done.stdout
    found = subprocess.run(
        ["srun", "-n", "1", sys.executable, "-m", "telegrad", "doctor"],
        env=slurm,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "started by" in found.stdout and "Slurm: rank 0 (SLURM_PROCID)" in found.stdout, found.stdout + found.stderr
