"""What encryption costs: Telegrad over TCP without and with TLS, interleaved, above what bare sockets do.

    python -m benchmarks --cases tls        (--quick for fewer rounds)

The bars are 15 us on a small call and 40% on 128 MB. The bare rows are the floor: two processes with nothing but
Python's `socket` and `ssl`, 200 bytes there and back and 128 MB one way into touched memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks import apis, cluster, harness
from telegrad.transport.tls import TlsEnds, ends_by_fingerprint

MB = 1 << 20
LARGE = 128 * MB
SMALL = 200
CASES = (("empty", "empty call", "us"), ("send128", "128 MB sent", "ms"), ("echo128", "128 MB there and back", "ms"))
UNITS = {"us": 1e6, "ms": 1e3}


def main(quick: bool) -> int:
    """Measure and print."""
    ends = ends_by_fingerprint()
    if ends is None:
        print("TLS needs the package `cryptography`: pip install telegrad[tls]")
        return 1
    plan = harness.QUICK if quick else harness.FULL
    print(f"{'':<28}{'plain':>12}{'TLS':>12}{'more':>12}{'ratio':>8}")
    _bare(ends, plan)
    cluster.preload()
    with contextlib.ExitStack() as stack:
        clusters = {kind: stack.enter_context(cluster.Cluster("telegrad", 2, kind)) for kind in (apis.TCP, apis.TLS)}
        for key, title, unit in CASES:
            times: dict[str, list[float]] = {kind: [] for kind in clusters}
            cpu: dict[str, list[float]] = {kind: [] for kind in clusters}
            for _ in range(plan.rounds):
                for kind, workers in clusters.items():
                    before = sum(workers.order_all("cpu", deadline=plan.deadline))
                    sampled = workers.order("sample", key, plan.seconds, plan.least_steps, deadline=plan.deadline)
                    cpu[kind].append((sum(workers.order_all("cpu", deadline=plan.deadline)) - before) / sampled.steps)
                    times[kind] += sampled.seconds
            _show(title, unit, times[apis.TCP], times[apis.TLS])
            _show("  CPU time, both workers", unit, cpu[apis.TCP], cpu[apis.TLS])
    return 0


def _show(title: str, unit: str, plain: list[float], encrypted: list[float]) -> None:
    one, other = (statistics.median(times) * UNITS[unit] for times in (plain, encrypted))
    print(
        f"{title:<28}{one:>9.1f} {unit}{other:>9.1f} {unit}{other - one:>9.1f} {unit}{other / one:>7.2f}x", flush=True
    )


# --- bare sockets ---


def _bare(ends: TlsEnds, plan: harness.Plan) -> None:
    with _echo_process(None) as plain, _echo_process(ends) as encrypted:
        for title, unit, step in (
            ("bare socket, 200 bytes", "us", _ping),
            ("bare socket, 128 MB", "ms", _pour),
        ):
            times: dict[socket.socket, list[float]] = {plain: [], encrypted: []}
            for _ in range(plan.rounds):
                for sock in times:
                    times[sock] += _timed(step, sock, plan)
            _show(title, unit, times[plain], times[encrypted])


def _timed(step: Callable[[socket.socket], None], sock: socket.socket, plan: harness.Plan) -> list[float]:
    step(sock)
    samples: list[float] = []
    until = time.perf_counter() + plan.seconds
    while len(samples) < plan.least_steps or time.perf_counter() < until:
        begun = time.perf_counter()
        step(sock)
        samples.append(time.perf_counter() - begun)
    return samples


_small = bytes(SMALL)
_large = bytes(LARGE)


def _ping(sock: socket.socket) -> None:
    sock.sendall(_small)
    _wait(sock)
    sock.recv(SMALL)


def _pour(sock: socket.socket) -> None:
    sock.sendall(_large)
    sock.recv(SMALL)


def _wait(sock: socket.socket) -> None:
    """Look again and again, as Telegrad does for a small call: falling asleep costs more than the call."""
    look = select.poll()
    look.register(sock, select.POLLIN)
    while not look.poll(0):
        os.sched_yield()


@contextlib.contextmanager
def _echo_process(ends: TlsEnds | None) -> Iterator[socket.socket]:
    """A connection to a process that answers small messages with themselves and large ones with a few bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            try:
                _answer(listener, ends)
            finally:
                os._exit(0)
        sock = socket.create_connection(listener.getsockname())
    _prepare(sock)
    try:
        with sock if ends is None else ends.client.wrap_socket(sock) as connection:
            yield connection
    finally:
        os.waitpid(pid, 0)


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MB)


def _answer(listener: socket.socket, ends: TlsEnds | None) -> None:
    sock, _ = listener.accept()
    _prepare(sock)
    if ends is not None:
        sock = ends.server.wrap_socket(sock, server_side=True)
    memory = memoryview(bytearray(LARGE))
    while True:
        _wait(sock)
        got = sock.recv_into(memory)
        if not got:
            return
        if got > SMALL:  # the first piece of a large one
            while got < LARGE:
                got += sock.recv_into(memory[got:])
        sock.sendall(_small)
