"""A worker is killed while its device memory is lent, or while it has ours: no hang, no wrong number, nothing lost."""

import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.errors import TelegradError
from tests.cluster import cluster
from tests.cuda.helpers import LONG, echo, warm
from tests.waiting import wait_until

SIZE = 2**22


def pending(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(LONG)
    return x + 1


def answers(x: torch.Tensor) -> bool:
    try:
        rpc.rpc_sync("worker1", echo, args=(x,), timeout=5)
    except TelegradError:
        return False
    return True


def used_by_others() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def kill_one(time_: int) -> None:
    """One worker, killed at another moment each time."""
    with cluster(2) as made:
        warm()
        x = torch.full((SIZE,), float(time_), device="cuda")
        futures = [rpc.rpc_async("worker1", pending, args=(x,)) for _ in range(6)]
        first = rpc.rpc_sync("worker1", echo, args=(x,)) if time_ % 2 else None
        killer = threading.Timer(0.01 * (time_ % 7), made.kill, args=("worker1",))
        killer.start()
        for future in futures:
            try:
                value = future.wait()
            except TelegradError:
                continue
            assert set(value.unique().tolist()) <= {time_ + 1.0}, "a wrong number"
        killer.join()
        wait_until(lambda: not answers(x))
        if first is not None:
            assert first.unique().tolist() == [float(time_)]
        torch.cuda.synchronize()
        assert (x + 1).unique().tolist() == [time_ + 1.0], "the GPU does not go on"


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_killed_while_memory_is_lent(long_profile: bool) -> None:
    torch.zeros(1, device="cuda")
    before: int | None = None
    for time_ in range(50 if long_profile else 3):
        kill_one(time_)
        torch.cuda.empty_cache()
        if before is None:
            time.sleep(1.0)  # the driver takes back a killed process's memory by and by
            before = used_by_others()
    assert before is not None
    wait_until(lambda: used_by_others() <= before + 64 * 2**20, seconds=60)
