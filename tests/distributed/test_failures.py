"""Workers that die, stop, come back or lose a connection: what waits on them ends at once and names them.

Every test makes a cluster of its own and harms it. Times are bounds on what a user would notice, far above what is
usual: a death is noticed within milliseconds, a stop within three heartbeats.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry
from telegrad.errors import ContextFailed, RpcTimeout, WorkerDied
from telegrad.rpc.current import require_agent
from tests.cluster import Cluster, cluster, process, serve
from tests.waiting import stop_process

pytestmark = pytest.mark.slow

HEARTBEAT = 0.3
AT_ONCE = 30.0  # seconds, on a busy machine; what is not noticed takes as long as the call's own deadline, a minute
STOPPED = 3 * HEARTBEAT + AT_ONCE
HARMLESS = {"heartbeat": HEARTBEAT}


@contextmanager
def harmed(size: int, **options: Any) -> Iterator[Cluster]:
    """A cluster whose workers are killed at the end: those that a test stopped would not end by themselves."""
    with cluster(size, **{**HARMLESS, **options}) as made:
        yield made
        for each in made.processes:
            each.kill()
            each.join()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def revive(made: Cluster, name: str) -> None:
    """Start a worker again under its old name and rank."""
    rank = made.names.index(name)
    made.processes[rank - 1] = process(serve, name, rank, made.size, made.meeting, HARMLESS)


def stop(made: Cluster, name: str) -> None:
    """Stop a worker, and return when it has stopped."""
    pid = made.processes[made.others.index(name)].pid
    assert pid is not None
    stop_process(pid)


def go_on(made: Cluster, name: str) -> None:
    pid = made.processes[made.others.index(name)].pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)


# --- what runs on the workers ---

_weights: dict[str, torch.Tensor] = {}
_counts: dict[str, int] = {}


def weight(key: str = "w") -> torch.Tensor:
    return _weights.setdefault(key, torch.full((2,), 3.0, requires_grad=True))


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight()


def through(next_worker: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(next_worker, scale, args=(x * weight(),))


def leave_a_mark(path: str, seconds: float) -> int:
    """And stay until it is taken away, but not for longer than that."""
    with open(path, "a") as marks:
        marks.write(f"{os.getpid()}\n")
    deadline = time.monotonic() + seconds
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getpid()


def leave_marks(path: str) -> int:
    """The first call lasts until it is killed."""
    return leave_a_mark(path, 0.0 if os.path.exists(path) else 150.0)


def hold_the_interpreter(seconds: float) -> str:
    """Sleep in C without letting any other Python thread of this process run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "done"


def count(key: str) -> int:
    _counts[key] = _counts.get(key, 0) + 1
    return _counts[key]


class _Stall(torch.autograd.Function):
    """Its backward takes long, so that a worker can be harmed in the middle of a pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: str, seconds: float) -> torch.Tensor:
        ctx.path, ctx.seconds = path, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        leave_a_mark(ctx.path, ctx.seconds)
        return gradient, None, None


def stalling(x: torch.Tensor, path: str, seconds: float) -> torch.Tensor:
    return _Stall.apply(x * weight(), path, seconds)


def stalling_through(next_worker: str, x: torch.Tensor, path: str, seconds: float) -> torch.Tensor:
    return rpc.rpc_sync(next_worker, stalling, args=(x * weight(), path, seconds))


def contexts_here() -> int:
    return len(registry())


def sessions_and_links() -> tuple[int, int]:
    agent = require_agent()
    return len(agent.peers.sessions()), sum(link.connected for link in agent.peers.links())


def wait_at(other: str, path: str) -> Any:
    return rpc.rpc_sync(other, leave_a_mark, args=(path, 150.0))


def cut_my_connections() -> None:
    """As if the network had dropped every connection of this process, in and out."""
    agent = require_agent()
    connections = [link.current for link in agent.peers.links()] + [s.connection for s in agent.peers.sessions()]
    for connection in connections:
        with contextlib.suppress(OSError, AttributeError):  # not there, or lost this very moment
            connection.stream._socket.shutdown(socket.SHUT_RDWR)


def _marked(path: str) -> Callable[[], bool]:
    return lambda: os.path.exists(path) and os.path.getsize(path) > 0


def _check_step(middle: str, last: str) -> None:
    """One step over two workers, against what one process gives."""
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        autograd.backward(context_id, [rpc.rpc_sync(middle, through, args=(last, x)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [9.0, 9.0]


# --- dead workers ---


def test_killed_while_it_serves(tmp_path: Any) -> None:
    with harmed(3) as made:
        future = rpc.rpc_async("worker1", leave_a_mark, args=(str(tmp_path / "m"), 150.0))
        until(_marked(str(tmp_path / "m")))
        made.kill("worker1")
        with within(AT_ONCE), pytest.raises(WorkerDied, match=r"worker1.*leave_a_mark") as caught:
            future.wait()
        assert caught.value.worker == "worker1"
        assert caught.value.incarnation != 0
        assert rpc.rpc_sync("worker2", torch.add, args=(1, 1)) == 2


def test_killed_while_nobody_asks_it() -> None:
    with harmed(3) as made:
        rpc.rpc_sync("worker1", count, args=("k",))
        made.kill("worker1")
        with within(AT_ONCE), pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker1", count, args=("k",))


def test_killed_before_it_was_ever_called() -> None:
    with harmed(3) as made:
        made.kill("worker2")
        with within(AT_ONCE), pytest.raises(WorkerDied, match="worker2"):
            rpc.rpc_sync("worker2", count, args=("k",))


def test_killed_owner_of_a_reference() -> None:
    with harmed(3) as made:
        reference = rpc.remote("worker1", torch.ones, args=(2,))
        assert reference.to_here().tolist() == [1.0, 1.0]
        made.kill("worker1")
        with within(AT_ONCE), pytest.raises(WorkerDied, match="worker1"):
            reference.to_here()


@pytest.mark.parametrize("hops", [1, 2])
def test_killed_in_a_backward_pass(tmp_path: Any, hops: int) -> None:
    """In its own part of the pass, one hop and two hops from the root. The context says why it is of no more use."""
    mark = str(tmp_path / "m")
    with harmed(3) as made:
        victim = "worker1" if hops == 1 else "worker2"
        with autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            if hops == 1:
                y = rpc.rpc_sync("worker1", stalling, args=(x, mark, 150.0))
            else:
                y = rpc.rpc_sync("worker1", stalling_through, args=("worker2", x, mark, 150.0))
            killer = threading.Thread(target=lambda: (until(_marked(mark)), made.kill(victim)))
            killer.start()
            with pytest.raises(WorkerDied, match=victim) as caught:
                autograd.backward(context_id, [y.sum()])
            killer.join()
            assert caught.value.worker == victim
            with pytest.raises(ContextFailed, match=victim):
                rpc.rpc_sync("worker1" if hops == 2 else "worker2", scale, args=(x,))
        survivors = [name for name in made.others if name != victim]
        for name in survivors:
            until(lambda name=name: rpc.rpc_sync(name, contexts_here) == 0)
        with autograd.context() as context_id:  # tried again at once
            x = torch.ones(2, requires_grad=True)
            autograd.backward(context_id, [rpc.rpc_sync(survivors[0], scale, args=(x,)).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0]


def test_a_dead_caller_is_forgotten_by_those_it_called(tmp_path: Any) -> None:
    with harmed(3) as made:
        mark = str(tmp_path / "m")
        rpc.rpc_async("worker1", wait_at, args=("worker2", mark)).add_done_callback(lambda _: None)
        until(_marked(mark))
        before = rpc.rpc_sync("worker2", sessions_and_links)
        made.kill("worker1")
        until(lambda: rpc.rpc_sync("worker2", sessions_and_links)[0] == before[0] - 1)


def test_shutdown_does_not_wait_for_the_dead(tmp_path: Any) -> None:
    """Also not for the one that kept the book, which is rank 0 and this process: so another leaves first."""
    with harmed(3) as made:
        made.kill("worker1")
        with within(AT_ONCE):
            rpc.shutdown(timeout=120)
        made.processes[1].join(60)
        assert made.processes[1].exitcode == 0
        _become_a_worker_again(tmp_path)


def _become_a_worker_again(tmp_path: Any) -> None:
    rpc.init_rpc(
        "worker0",
        rank=0,
        world_size=1,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/alone"),
    )


# --- stopped and busy workers ---


def test_stopped_while_called() -> None:
    with harmed(3) as made:
        rpc.rpc_sync("worker1", count, args=("k",))
        stop(made, "worker1")
        with within(STOPPED), pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker1", count, args=("k",))


def test_stopped_before_it_was_ever_called() -> None:
    with harmed(3) as made:
        stop(made, "worker2")
        with within(STOPPED), pytest.raises(WorkerDied, match="worker2"):
            rpc.rpc_sync("worker2", count, args=("k",))


def test_stopped_while_a_large_message_is_written_to_it() -> None:
    with harmed(2, shared_memory=False) as made:
        rpc.rpc_sync("worker1", count, args=("k",))
        stop(made, "worker1")
        with within(STOPPED), pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(16 * 2**20),))


def test_stopped_in_a_backward_pass() -> None:
    with harmed(3) as made, autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync("worker1", through, args=("worker2", x))
        stop(made, "worker2")
        with within(STOPPED), pytest.raises(WorkerDied, match="worker2") as caught:
            autograd.backward(context_id, [y.sum()])
        assert caught.value.worker == "worker2"


def test_a_stopped_worker_does_not_hold_up_a_shutdown(tmp_path: Any) -> None:
    with harmed(3) as made:
        rpc.rpc_sync("worker1", count, args=("k",))
        stop(made, "worker1")
        with pytest.raises(WorkerDied):
            rpc.rpc_sync("worker1", count, args=("k",))
        with within(STOPPED):
            rpc.shutdown(timeout=120)
        _become_a_worker_again(tmp_path)


def test_one_that_was_held_for_dead_and_goes_on_is_refused() -> None:
    """Its requests were forgotten with it. To take it back could run them twice."""
    with harmed(3) as made:
        rpc.rpc_sync("worker1", rpc.rpc_sync, args=("worker0", count, ("mine",)))
        stop(made, "worker1")
        with pytest.raises(WorkerDied):
            rpc.rpc_sync("worker1", count, args=("k",))
        go_on(made, "worker1")
        with pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker1", count, args=("k",))
        with pytest.raises(WorkerDied, match="worker0"):
            rpc.rpc_sync("worker2", rpc.rpc_sync, args=("worker1", rpc.rpc_sync, ("worker0", count, ("mine",))))


@pytest.mark.parametrize("way", [{}, {"transports": ("tcp",)}], ids=["unix", "tcp"])
def test_a_busy_worker_is_not_dead(way: dict[str, Any]) -> None:
    """Not even one that keeps Python's lock, so that no thread of it can answer a ping."""
    with harmed(2, **way):
        assert rpc.rpc_sync("worker1", hold_the_interpreter, args=(3 * 3 * HEARTBEAT,)) == "done"


# --- lost connections ---


@pytest.mark.parametrize("way", [{}, {"transports": ("tcp",)}], ids=["unix", "tcp"])
def test_a_lost_connection_is_replaced_and_nothing_runs_twice(way: dict[str, Any]) -> None:
    with harmed(3, **way):
        for number in range(1, 30):
            future = rpc.rpc_async("worker1", count, args=("c",))
            cut_my_connections()
            assert future.wait() == number
        for _ in range(5):
            rpc.rpc_sync("worker1", cut_my_connections)
            _check_step("worker1", "worker2")


def test_contexts_end_although_connections_are_cut_as_they_do() -> None:
    """The notice that a context has ended needs no reply, and arrives all the same."""
    with harmed(3):
        for _ in range(10):
            _check_step("worker1", "worker2")
            cut_my_connections()
        for name in ("worker1", "worker2"):
            until(lambda name=name: rpc.rpc_sync(name, contexts_here) == 0)


# --- restarts ---


def test_a_worker_that_is_started_again() -> None:
    with harmed(3) as made:
        old = rpc.remote("worker1", torch.ones, args=(2,))
        old.to_here()
        assert rpc.rpc_sync("worker1", count, args=("k",)) == 1
        _check_step("worker2", "worker1")
        made.kill("worker1")
        revive(made, "worker1")
        until(lambda: _answers("worker1"))
        assert rpc.rpc_sync("worker1", count, args=("k",)) == 1  # the new one has the memory of nothing
        with pytest.raises(WorkerDied, match="worker1"):
            old.to_here()
        _check_step("worker1", "worker2")
        _check_step("worker2", "worker1")  # others find it too
        assert rpc.rpc_sync("worker1", rpc.rpc_sync, args=("worker0", torch.add, (1, 1))) == 2


def _answers(name: str) -> bool:
    try:
        rpc.rpc_sync(name, torch.add, args=(1, 1))
    except WorkerDied:
        return False
    return True


def test_retries_wait_for_a_restart(tmp_path: Any) -> None:
    mark = str(tmp_path / "m")
    with harmed(2) as made:

        def kill_and_revive() -> None:
            until(_marked(mark))
            made.kill("worker1")
            revive(made, "worker1")

        threading.Thread(target=kill_and_revive, daemon=True).start()
        pid = rpc.rpc_sync("worker1", leave_marks, args=(mark,), timeout=90, retries=1)
        assert pid == made.processes[0].pid
        with open(mark) as marks:
            assert len(marks.readlines()) == 2


def test_no_retry_unless_asked_for(tmp_path: Any) -> None:
    mark = str(tmp_path / "m")
    with harmed(2) as made:
        threading.Thread(target=lambda: (until(_marked(mark)), made.kill("worker1")), daemon=True).start()
        with pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker1", leave_a_mark, args=(mark, 150.0), timeout=60)
        with within(AT_ONCE), pytest.raises(WorkerDied, match="not started again"):
            rpc.rpc_sync("worker1", leave_a_mark, args=(mark, 0.0), timeout=0.5, retries=3)


# --- overload ---


def test_a_worker_that_does_not_take_in_pushes_back() -> None:
    """What it has not read stays at its caller, who waits until the deadline and not longer."""
    with harmed(2, shared_memory=False, heartbeat=30) as made:
        rpc.rpc_sync("worker1", count, args=("k",))
        stop(made, "worker1")
        with within(AT_ONCE), pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(16 * 2**20),), timeout=1.0)
        go_on(made, "worker1")
        assert rpc.rpc_sync("worker1", count, args=("k",)) == 2  # half a message was written, and is forgotten


# --- explaining a hang ---


def test_waits_are_shown_along_the_chain(tmp_path: Any) -> None:
    mark = str(tmp_path / "m")
    with harmed(3) as made:
        future = rpc.rpc_async("worker1", wait_at, args=("worker2", mark))
        until(_marked(mark))
        assert re.search(r"call \d+ to worker1: wait_at\(\) on worker 'worker1', for ", rpc.debug_waits())
        chain = r"worker0 call.*\n(.*\n)*?  worker1 call \d+ to worker2.*\n(.*\n)*?    worker2 serves a Py"
        until(lambda: re.search(chain, rpc.debug_waits(cluster=True)) is not None)
        stop(made, "worker2")
        assert "worker2 does not answer" in rpc.debug_waits(cluster=True)
        with pytest.raises(WorkerDied, match="worker2"):
            future.wait()


def test_waits_of_a_backward_pass(tmp_path: Any) -> None:
    mark = str(tmp_path / "m")
    with harmed(3), autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync("worker1", stalling_through, args=("worker2", x, mark, 150.0))
        done = autograd.backward_async(context_id, [y.sum()])
        until(_marked(mark))
        wait = f"worker1 backward of context {context_id}, begun by worker0, waits for worker2"
        until(lambda: wait in rpc.debug_waits(cluster=True))
        os.remove(mark)
        done.wait()
