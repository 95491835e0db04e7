"""Interrupts at random moments, and children that are forked: nothing stays pending, nobody else is ended."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.threads import interrupts
from tests.cluster import cluster
from tests.waiting import wait_until

SHORT, LONG = 40, 200


def work(x: torch.Tensor, pause: float) -> torch.Tensor:
    if pause:
        time.sleep(pause)
    return x * 2


def _one(source: random.Random) -> None:
    """One of the things that a program does, at whose random moment the interrupt comes."""
    chance = source.random()
    x = torch.ones(2, 2, requires_grad=True)
    pause = source.choice((0.0, 0.0, 0.005))
    plain = x.detach()
    if chance < 0.4:
        rpc.rpc_sync("worker1", work, (plain, pause), timeout=60)
    elif chance < 0.5:
        rpc.rpc_async("worker1", work, (plain, pause), timeout=60).wait()
    elif chance < 0.7:
        rpc.remote("worker1", work, (plain, pause), timeout=60).to_here()
    else:
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", work, (x, pause), timeout=60)
            autograd.backward(context_id, [y.sum()], timeout=60)


def _interrupted(source: random.Random) -> bool:
    """Work until the interrupt comes; whether it did."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(source.uniform(0.0, 0.02), signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()  # in here: it may come at once
        until = time.monotonic() + 20
        while time.monotonic() < until:
            _one(source)
    except KeyboardInterrupt:
        return True
    finally:
        timer.join()
    return False


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_interrupts_at_random_moments(long_profile: bool) -> None:
    source = random.Random(11)
    with cluster(2):
        came = 0
        for _ in range(LONG if long_profile else SHORT):
            came += _interrupted(source)
            assert torch.equal(rpc.rpc_sync("worker1", work, (torch.ones(1), 0.0), timeout=60), torch.full((1,), 2.0))
        assert came == (LONG if long_profile else SHORT)
        wait_until(lambda: not require_agent().under_way(), 40)  # and the shutdown of this cluster is graceful


def test_an_interrupted_join_leaves_nothing(tmp_path: object) -> None:
    main = threading.main_thread().ident
    assert main is not None
    before = signal.getsignal(signal.SIGINT)
    for number in range(5):
        timer = threading.Timer(0.1 + 0.05 * number, signal.pthread_kill, (main, signal.SIGINT))
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meeting{number}")

        def join() -> None:
            timer.start()  # noqa: B023 - called at once. In here: the interrupt may come before the join has begun
            rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)  # noqa: B023

        with pytest.raises(KeyboardInterrupt):
            join()
        timer.join()
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/last")
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    rpc.shutdown(timeout=60)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.chaos
def test_joins_that_are_interrupted_at_random_moments(tmp_path: Path, long_profile: bool) -> None:
    """While this worker joins or leaves: it has left then, or had not come, and can join again."""
    main = threading.main_thread().ident
    assert main is not None
    source, numbers = random.Random(13), itertools.count()
    before, threads = signal.getsignal(signal.SIGINT), threading.active_count()

    def join_again_and_again(timer: threading.Timer) -> None:
        timer.start()  # in here: it may come at once
        while True:
            options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/{next(numbers)}")
            rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
            rpc.shutdown(timeout=60)

    for _ in range(LONG if long_profile else 10):
        timer = threading.Timer(source.uniform(0.0, 0.1), signal.pthread_kill, (main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            join_again_and_again(timer)
        timer.join()
        if current_agent() is not None:  # it came between the two
            rpc.shutdown(timeout=60)
    assert signal.getsignal(signal.SIGINT) is before
    wait_until(lambda: threading.active_count() <= threads)


def test_where_an_interrupt_may_be_raised() -> None:
    assert interrupts.may_interrupt(sys._getframe())
    seen = []
    interrupts.interruptible(lambda: None)

    def look(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():  # others may sleep, too
            seen.append(interrupts.may_interrupt(sys._getframe()))

    original, time.sleep = time.sleep, look
    try:
        interrupts.pause(0)
    finally:
        time.sleep = original
    assert seen == [True]


FORKS = """
import os, sys, torch, telegrad
from telegrad import rpc

def who():
    return os.getpid()

if __name__ == "__main__":
    with telegrad.local_cluster(workers=2, show_output=False) as cluster:
        first = rpc.rpc_sync("worker1", who)
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended == 3, ended
        assert rpc.rpc_sync("worker1", who, timeout=60) == first
    print("ended well")
"""


@pytest.mark.slow
def test_a_forked_child_ends_nobody(tmp_path: object) -> None:
    """A child that called `sys.exit` ended the workers of its parent."""
    path = os.path.join(str(tmp_path), "program.py")
    with open(path, "w") as file:
        file.write(FORKS)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0 and "ended well" in done.stdout, done.stderr
