"""Without room for blocks on the GPU messages go through the host, with one warning."""

import logging

import pytest
import torch

from telegrad import rpc
from telegrad.transport.device import ways
from telegrad.transport.device.blocks import budget
from telegrad.transport.device.leftovers import collect
from tests.cluster import cluster
from tests.cuda.helpers import echo
from tests.waiting import wait_until


def test_without_room_messages_go_through_the_host(caplog: pytest.LogCaptureFixture) -> None:
    ways._say_once.cache_clear()
    wait_until(lambda: collect() is None and budget.taken(0) == 0, seconds=20)  # what tests before this one left
    with cluster(2, cuda_memory_share=0.0), caplog.at_level(logging.WARNING, "telegrad.transport"):
        for size in (10, 2**20, 2**24):
            sent = torch.rand(size, device="cuda")
            assert torch.equal(rpc.rpc_sync("worker1", echo, args=(sent,)), sent)
        assert budget.taken(0) == 0
    assert len([record for record in caplog.records if "cuda_memory_share" in record.message]) == 1
    budget.share = 0.1
