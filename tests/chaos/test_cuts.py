"""Every message of a scenario in turn is cut off, cut in half, sent twice or delayed, on every worker: nobody notices.

The streams between workers are reliable, so a message is lost only together with its connection, and messages change
places only when one comes again over the next connection. That is what is done here: the connection ends before the
message, in its middle, or right after it; and a message comes twice, as it does when its first copy had arrived after
all. The scenario has nested calls, a reference, a backward pass over three workers and the end of a context.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry
from telegrad.rpc.current import require_agent
from telegrad.rref.rref_context import rrefs_of
from telegrad.transport.stream import SocketStream
from tests.cluster import cluster

WORKERS = ["worker0", "worker1", "worker2"]
MOST_MESSAGES = 60


class Fault:
    """What happens to one message that this process sends, counted from when the fault was armed."""

    kind = ""
    at = 0
    seen = 0
    lock = threading.Lock()


_send = SocketStream.send


def faulty_send(stream: Any, buffers: Any, deadline: float | None, blocked: Callable[[], None]) -> None:
    with Fault.lock:
        Fault.seen += 1
        kind = Fault.kind if Fault.seen == Fault.at else ""
    if kind == "delay":
        time.sleep(0.02)
    elif kind == "cut before":
        _cut(stream)
    elif kind == "cut in half":
        data = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
        _send(stream, [data[: len(data) // 2]], deadline, blocked)
        _cut(stream)
    elif kind == "twice":
        _send(stream, buffers, deadline, blocked)
    _send(stream, buffers, deadline, blocked)
    if kind == "cut after":
        _cut(stream)


def _cut(stream: Any) -> None:
    with contextlib.suppress(OSError):
        stream._socket.shutdown(socket.SHUT_RDWR)


def arm(kind: str, at: int) -> None:
    """Have the fault happen to the `at`-th message from now on."""
    SocketStream.send = faulty_send
    with Fault.lock:
        Fault.kind, Fault.at, Fault.seen = kind, at, 0


def disarm() -> int:
    """No more faults; how many messages were sent since they were armed."""
    SocketStream.send = _send
    return Fault.seen


_weight = torch.full((2,), 3.0, requires_grad=True)
_calls: dict[str, int] = {}


def count(key: str) -> int:
    _calls[key] = _calls.get(key, 0) + 1
    return _calls[key]


def scale(x: torch.Tensor, key: str) -> torch.Tensor:
    count(key)
    return x * _weight


def through(x: torch.Tensor, key: str) -> torch.Tensor:
    count(key)
    reference = rpc.remote("worker2", scale, args=(x * _weight, key))
    return reference.to_here()


def calls_of(key: str) -> int:
    return _calls.pop(key, 0)


def tables() -> tuple[int, int]:
    """Contexts and values of references that are still here."""
    return len(registry()), len(rrefs_of(require_agent()).owned)


def scenario(key: str) -> None:
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync("worker1", through, args=(x, key), timeout=60)
        unused = rpc.rpc_sync("worker2", scale, args=(x, key + " unused"), timeout=60)
        autograd.backward(context_id, [y.sum()], timeout=60)
        assert autograd.get_gradients(context_id)[x].tolist() == [9.0, 9.0]
        del unused


def check_traces(key: str) -> None:
    """Each function ran once, and nothing is left of the context or the reference anywhere."""
    assert rpc.rpc_sync("worker1", calls_of, args=(key,)) == 1
    assert rpc.rpc_sync("worker2", calls_of, args=(key,)) == 1
    assert rpc.rpc_sync("worker2", calls_of, args=(key + " unused",)) == 1
    deadline = time.monotonic() + 60
    while left := {name: t for name in WORKERS if (t := rpc.rpc_sync(name, tables)) != (0, 0)}:
        assert time.monotonic() < deadline, f"contexts and values are left: {left}"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("way", [{"transports": ("unix",)}, {"transports": ("tcp",)}], ids=["unix", "tcp"])
@pytest.mark.parametrize("kind", ["cut before", "cut in half", "cut after", "twice", "delay"])
def test_every_message_in_turn(kind: str, way: dict[str, Any]) -> None:
    with cluster(3, shared_memory=False, heartbeat=1.0, **way):
        scenario("warm")
        for name in WORKERS:
            for at in range(1, MOST_MESSAGES):
                key = f"{kind} {at} on {name}"
                rpc.rpc_sync(name, arm, args=(kind, at), timeout=60)
                try:
                    scenario(key)
                    sent = rpc.rpc_sync(name, disarm, timeout=60)
                    check_traces(key)
                except BaseException as error:
                    error.add_note(f"with {key}")
                    raise
                if at > sent:
                    break
