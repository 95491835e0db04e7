"""torchrun: two nodes that are two network namespaces, elastic restarts, and a node that comes later."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("TELEGRAD_S")},
    "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    "OMP_NUM_THREADS": "1",
}

CALL_ALL = """
import os, sys
from telegrad import rpc

def who():
    return rpc.get_worker_info().name

rpc.init_rpc()
size = int(os.environ["WORLD_SIZE"])
answers = [rpc.rpc_sync(f"worker{rank}", who) for rank in range(size)]
assert answers == [f"worker{rank}" for rank in range(size)], answers
os.write(1, f"called {len(answers)} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n".encode())  # in one piece
"""

DIE_ONCE = """
import os, signal, time
import torch
from telegrad import rpc

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rpc.init_rpc()
for step in range(5):
    if rank == 0:
        # After the restart no step may meet the dead of the first start.
        try:
            rpc.rpc_sync("worker2", torch.add, args=(1, step), timeout=20)
        except Exception as error:
            os.write(1, f"failed {attempt} {type(error).__name__}\\n".encode())
            raise
    elif rank == 2 and attempt == 0 and step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
os.write(1, f"done {rank} {attempt}\\n".encode())
rpc.shutdown(timeout=30)
"""


@pytest.fixture
def nodes() -> Iterator[tuple[list[str], list[str], str]]:
    """Prefixes that run a command on each of two nodes, and the address of the first."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    pid = os.getpid()
    spaces, block = [f"tge{pid}a", f"tge{pid}b"], f"10.{pid // 256 % 256}.{pid % 256}"
    commands = [
        *(["ip", "netns", "add", space] for space in spaces),
        [
            "ip",
            "link",
            "add",
            f"tga{pid}",
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            f"tgb{pid}",
            "netns",
            spaces[1],
        ],
    ]
    for space, device, last in ((spaces[0], f"tga{pid}", 1), (spaces[1], f"tgb{pid}", 2)):
        for command in (
            ["ip", "address", "add", f"{block}.{last}/24", "dev", device],
            ["ip", "link", "set", device, "up"],
            ["ip", "link", "set", "lo", "up"],
        ):
            commands.append(["ip", "netns", "exec", space, *command])
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield ["ip", "netns", "exec", spaces[0]], ["ip", "netns", "exec", spaces[1]], f"{block}.1"
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def start(prefix: list[str], arguments: list[str], script: Path, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*prefix, *TORCHRUN, *arguments, str(script)],
        env={**ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(started: list["subprocess.Popen[str]"], seconds: float = 120) -> list[str]:
    """What processes said, when all have ended; they are ended at the deadline."""
    deadline = time.monotonic() + seconds
    said = []
    try:
        for each in started:
            out, _ = each.communicate(timeout=max(1.0, deadline - time.monotonic()))
            said.append(out)
    finally:
        for each in started:
            each.kill()
            each.wait()
    return said


def rendezvous_at(address: str, nnodes: str) -> list[str]:
    return [
        "--nnodes",
        nnodes,
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{address}:29411",
    ]


def test_two_nodes_find_their_addresses(nodes: tuple[list[str], list[str], str], tmp_path: Path) -> None:
    first, second, address = nodes
    script = tmp_path / "call_all.py"
    script.write_text(CALL_ALL + "rpc.shutdown(timeout=30)\n")
    arguments = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", address, "--master-port", "29511"]
    secret = {"TELEGRAD_SECRET": "of this test, and long enough"}
    started = [
        start(prefix, [*arguments, "--node-rank", str(rank)], script, **secret)
        for rank, prefix in enumerate((first, second))
    ]
    said = outputs(started)
    assert [each.returncode for each in started] == [0, 0], said
    assert [out.count("called 4") for out in said] == [2, 2], said
    assert "frame #" not in "".join(said)  # no C++ stack traces when the store goes


def test_an_address_that_others_cannot_reach_is_named_at_the_join(
    nodes: tuple[list[str], list[str], str], tmp_path: Path
) -> None:
    first, second, address = nodes
    script = tmp_path / "call_all.py"
    script.write_text(CALL_ALL + "rpc.shutdown(timeout=30)\n")
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", address, "--master-port", "29511"]
    variables = {"TELEGRAD_SECRET": "of this test, and long enough", "TELEGRAD_HOST": "127.0.0.1"}
    started = [
        start(prefix, [*arguments, "--node-rank", str(rank)], script, **variables)
        for rank, prefix in enumerate((first, second))
    ]
    said = "".join(outputs(started))
    assert 0 not in [each.returncode for each in started]
    assert "the address it published" in said and "127.0.0.1:" in said, said
    assert "TELEGRAD_HOST" in said


def test_an_elastic_restart_meets_nobody_of_the_first_start(tmp_path: Path) -> None:
    script = tmp_path / "die_once.py"
    script.write_text(DIE_ONCE)
    started = [
        start([], ["--standalone", "--nproc-per-node", "3", "--max-restarts", "2", "--monitor-interval", "0.2"], script)
    ]
    (said,) = outputs(started)
    assert started[0].returncode == 0, said
    assert {f"done {rank} 1" for rank in range(3)} <= set(said.splitlines()), said
    assert "failed 1" not in said, said


def test_a_node_comes_later(nodes: tuple[list[str], list[str], str], tmp_path: Path) -> None:
    """--nnodes 1:2: the job begins on one node; when the second comes, torchrun starts all again with four workers."""
    first, second, address = nodes
    script, seen = tmp_path / "elastic.py", tmp_path / "seen"
    script.write_text(
        CALL_ALL
        + f"""
import pathlib, time
if size == 2:
    pathlib.Path({str(seen)!r}).touch()
    time.sleep(60)  # until torchrun ends it for the larger job
rpc.shutdown(timeout=30)
"""
    )
    addresses = [address, address.removesuffix(".1") + ".2"]
    arguments = [
        [*rendezvous_at(address, "1:2"), "--local-addr", mine, "--monitor-interval", "0.2", "--rdzv-conf", conf]
        for mine, conf in zip(
            addresses, ("last_call_timeout=1,is_host=1", "last_call_timeout=1,is_host=0"), strict=True
        )
    ]
    # Without this a node that comes later waits for an address that torchrun (2.13) never gives it.
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TELEGRAD_SECRET": "of this test, and long enough"}
    started = [start(first, arguments[0], script, **shared)]
    try:
        deadline = time.monotonic() + 60
        while not seen.exists():
            assert time.monotonic() < deadline and started[0].poll() is None
            time.sleep(0.1)
        started.append(start(second, arguments[1], script, **shared))
    finally:
        said = outputs(started, 90)
    assert [each.returncode for each in started] == [0, 0], said
    assert [out.count("called 4") for out in said] == [2, 2], said
