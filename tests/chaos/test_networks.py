"""Two workers in network namespaces of their own: a network that is slow, loses packets, is cut, or is cut one way.

Needs root, `ip` and, for delay and loss, netem in the kernel; a test is skipped where there is none. A direction
is cut by a wrong hardware address in the sender's neighbour table: what it sends arrives nowhere, and nobody is told.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import WorkerDied
from tests.cluster import join

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]

HEARTBEAT = 1.0
PATIENCE = 3 * HEARTBEAT
SHORT_CUT = 0.4  # TCP sends again after 0.2 s, then after twice as long each time: silence lasts longer than a cut
SECRET = "of this test only"
NOWHERE = "02:00:00:00:00:99"

SERVE = """
import sys
from tests.cluster import join
from telegrad import rpc
join("worker1", 1, 2, sys.argv[1], {"host": sys.argv[2], "secret": sys.argv[3], "heartbeat": float(sys.argv[4])})
rpc.shutdown()
"""


class Network:
    """A pair of virtual interfaces, one in this namespace and one in the other worker's."""

    def __init__(self) -> None:
        self.space = f"telegrad-{os.getpid()}"
        self.near, self.far = f"tgn{os.getpid()}", f"tgf{os.getpid()}"
        block = f"10.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
        self.near_address, self.far_address = f"{block}.1", f"{block}.2"
        _run("ip", "netns", "add", self.space)
        _run("ip", "link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.space)
        _run("ip", "address", "add", f"{self.near_address}/24", "dev", self.near)
        self.within("ip", "address", "add", f"{self.far_address}/24", "dev", self.far)
        _run("ip", "link", "set", self.near, "up")
        self.within("ip", "link", "set", self.far, "up")

    def within(self, *command: str) -> None:
        _run("ip", "netns", "exec", self.space, *command)

    def cut_to(self) -> None:
        """Nothing arrives at the other worker any more."""
        _run("ip", "neighbour", "replace", self.far_address, "lladdr", NOWHERE, "nud", "permanent", "dev", self.near)

    def cut_from(self) -> None:
        """Nothing arrives from the other worker any more."""
        self.within(
            "ip", "neighbour", "replace", self.near_address, "lladdr", NOWHERE, "nud", "permanent", "dev", self.far
        )

    def mend(self) -> None:
        """Both directions carry again."""
        _run("ip", "neighbour", "del", self.far_address, "dev", self.near, check=False)
        _run(
            "ip", "netns", "exec", self.space, "ip", "neighbour", "del", self.near_address, "dev", self.far, check=False
        )

    def spoil(self, *how: str) -> None:
        """Delay or lose packets in both directions."""
        for prefix, device in (((), self.near), (("ip", "netns", "exec", self.space), self.far)):
            done = _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "netem", *how, check=False)
            if done.returncode:
                pytest.skip(f"no netem here: {done.stderr.strip()}")

    def close(self) -> None:
        _run("ip", "link", "del", self.near, check=False)
        _run("ip", "netns", "del", self.space, check=False)


def _run(*command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, check=check, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    with tempfile.TemporaryDirectory(prefix="telegrad-test-") as folder:
        meeting = f"file://{folder}/meeting"
        command = [sys.executable, "-c", SERVE, meeting, made.far_address, SECRET, str(HEARTBEAT)]
        environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
        other = subprocess.Popen(["ip", "netns", "exec", made.space, *command], env=environment)
        try:
            options = {"host": made.near_address, "secret": SECRET, "heartbeat": HEARTBEAT}
            join("worker0", 0, 2, meeting, options)
            rpc.rpc_sync("worker1", torch.add, args=(1, 1))
            yield made
        finally:
            other.kill()
            other.wait()
            made.close()
            rpc.shutdown(graceful=False)


def steps(count: int) -> None:
    for _ in range(count):
        with autograd.context() as context_id:
            x = torch.ones(1000, requires_grad=True)
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, 3)).sum()])
            assert autograd.get_gradients(context_id)[x].eq(3).all()


@pytest.mark.parametrize("how", [("delay", "50ms", "20ms"), ("loss", "10%"), ("delay", "20ms", "reorder", "25%")])
def test_a_bad_network_only_delays(network: Network, how: tuple[str, ...]) -> None:
    network.spoil(*how)
    steps(50)


@pytest.mark.parametrize("cut", ["cut_to", "cut_from"])
def test_a_short_cut_only_delays(network: Network, cut: str) -> None:
    for _ in range(3):
        getattr(network, cut)()
        mender = threading.Timer(SHORT_CUT, network.mend)
        mender.start()
        steps(5)
        mender.join()


@pytest.mark.parametrize("cut", ["cut_to", "cut_from"])
def test_a_long_cut_is_a_death_for_both(network: Network, cut: str) -> None:
    """Also if one direction still carries: a worker that cannot be heard, or cannot hear, is of no use."""
    getattr(network, cut)()
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="worker1"):
        steps(1)
    assert time.monotonic() - began < 2 * PATIENCE + 15
