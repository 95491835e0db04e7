"""How much of the GPU blocks take: a share of it, given back when idle, and the host where there is no room."""

import time

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.current import require_agent
from telegrad.transport.device.blocks import budget
from telegrad.transport.device.leftovers import collect
from tests.cluster import Cluster
from tests.cuda.helpers import channel_to, echo, warm
from tests.waiting import wait_until

BIG = 64 * 2**20


def taken() -> int:
    return budget.taken(0)


def tidy() -> int:
    """Return what is idle, as the agent does now and then, and say what is left."""
    agent = require_agent()
    for end in (*agent.peers.links(), *agent.peers.sessions()):
        end.tidy(time.monotonic())
    collect()
    return taken()


def test_idle_blocks_go_back(pair: Cluster) -> None:
    warm()
    rpc.rpc_sync("worker1", echo, args=(torch.ones(BIG, dtype=torch.uint8, device="cuda"),))
    assert taken() >= BIG
    assert rpc.rpc_sync("worker1", taken) >= BIG

    def both_are_empty() -> bool:
        rpc.rpc_sync("worker1", tidy)  # each call carries what the two have to tell each other
        return tidy() + rpc.rpc_sync("worker1", taken) == 0

    wait_until(both_are_empty, seconds=20)
    sent = torch.rand(1000, device="cuda")
    assert torch.equal(rpc.rpc_sync("worker1", echo, args=(sent,)), sent)


def test_debug_waits_shows_what_is_lent(pair: Cluster) -> None:
    warm()
    channel = channel_to("worker1")
    block = channel.lender.take(0, 1000)
    try:
        assert "device memory" in rpc.debug_waits()
    finally:
        for number in (block.flag.written, block.flag.read, block.flag.let_go):
            number.set(block.uses)  # as if it had been sent and read


def test_the_share_is_checked() -> None:
    with pytest.raises(ValueError, match="cuda_memory_share"):
        rpc.RpcBackendOptions(cuda_memory_share=1.5)
