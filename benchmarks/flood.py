"""What a flood from strangers costs the calls of a job, and whether its workers still meet.

    python -m benchmarks.flood        (--quick for shorter rounds; `unix`, `tcp` or `tls` for one of the three)

A process without the secret opens connections to worker1 as fast as it can: it says nothing, or begins a handshake it
cannot end, or opens and closes. Meanwhile worker0 calls worker1, and one who knows the secret dials it anew. A flood
costs its own share of the machine's cores, whomever it goes to: so the same one against a listener that nobody needs is
measured, too, and the bar (5 ms at the 99th percentile) is on what worker1 adds to that.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import telegrad
from telegrad import rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.transport.addresses import TCP, UNIX, Address, connect
from telegrad.transport.handshake import DiallerHandshake, Hello
from telegrad.transport.stream import receive_exactly
from telegrad.transport.tls import dialling_ends

HELD = 200  # connections that a stranger keeps open, until it closes the oldest
DIALS = 5


def silent(address: Address, stop: Callable[[], bool]) -> None:
    """Connections on which nothing is said."""
    _hold(address, stop, b"")


def half_open(address: Address, stop: Callable[[], bool]) -> None:
    """Handshakes that are begun and not ended."""
    _hold(address, stop, DiallerHandshake(b"no idea").opening)


def half_encrypted(address: Address, stop: Callable[[], bool]) -> None:
    """The same one layer below, where the listener has to sign its answer before it can know who asks."""
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        dialling_ends().client.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    _hold(address, stop, hello.read())


def churn(address: Address, stop: Callable[[], bool]) -> None:
    """Connections that are closed at once."""
    while not stop():
        with contextlib.suppress(OSError):
            connect(address, 0.2).close()


def _hold(address: Address, stop: Callable[[], bool], says: bytes) -> None:
    held: list[socket.socket] = []
    while not stop():
        with contextlib.suppress(OSError):
            sock = connect(address, 0.2)
            held.append(sock)
            sock.sendall(says)
        if len(held) > HELD:
            held.pop(0).close()
    for sock in held:
        sock.close()


FLOODS = (silent, half_open, churn)


@contextlib.contextmanager
def flooded(flood: Callable[[Address, Callable[[], bool]], None], address: Address) -> Iterator[None]:
    """For the length of a block, after the flood has begun."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            seen = 0

            def stop() -> bool:
                nonlocal seen
                seen += 1
                if seen == HELD // 2:
                    os.write(write, b"!")
                return os.getppid() == 1

            flood(address, stop)
        finally:
            os._exit(0)
    os.close(write)
    try:
        os.read(read, 1)
        yield
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def sink(like: Address) -> Iterator[Address]:
    """A listener that nobody needs, where a process takes connections and closes them."""
    if like.kind == UNIX:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        where = "@" + listener.getsockname().decode()[1:]
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        where = str(listener.getsockname()[1])
    listener.listen(128)
    pid = os.fork()
    if pid == 0:
        try:
            while True:
                listener.accept()[0].close()
        finally:
            os._exit(0)
    listener.close()
    try:
        yield Address(like.kind, like.host, where)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def latencies(seconds: float) -> list[float]:
    """Of one call after the other to worker1, sorted."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = time.perf_counter()
        rpc.rpc_sync("worker1", os.getpid)
        times.append(time.perf_counter() - begun)
    return sorted(times)


def p99(times: list[float]) -> float:
    """Of sorted times."""
    return times[int(len(times) * 0.99)]


def dial_anew(agent: Agent, address: Address) -> float:
    """Seconds until one that knows the secret is let in, or an error."""
    target = agent.find("worker1")
    begun = time.perf_counter()
    plain = connect(address, 10.0)
    with contextlib.closing(plain):
        tls = bool(target.certificate) and address.kind == TCP
        sock = dialling_ends().wrap_dialled(plain, target.certificate, "worker1") if tls else plain
        handshake = DiallerHandshake(agent.connector.secret, target.certificate if tls else b"")
        sock.sendall(handshake.opening)
        hello = Hello(99, "late", random.getrandbits(40), target.incarnation, 1, False, "", ticket=bytes(16))
        sock.sendall(handshake.answer(receive_exactly(sock, handshake.opening_answer_bytes), hello))
        code, length = handshake.verdict_length(receive_exactly(sock, handshake.verdict_header_bytes))
        handshake.verdict(code, receive_exactly(sock, length))
    return time.perf_counter() - begun


def main(quick: bool, chosen: Sequence[str]) -> int:
    """Measure and print."""
    seconds = 1.0 if quick else 4.0
    print(f"{'':<28}{'p99 alone':>12}{'elsewhere':>12}{'here':>12}{'more':>12}   handshakes: ended, slowest")
    for title, kind, options in (
        ("Unix socket", UNIX, rpc.RpcBackendOptions()),
        ("TCP", TCP, rpc.RpcBackendOptions(transports=("tcp",))),
        ("TLS", TCP, rpc.RpcBackendOptions(transports=("tcp",), tls=True)),
    ):
        if chosen and title.split()[0].lower() not in chosen:
            continue
        with telegrad.local_cluster(workers=2, options=options, show_output=False):
            agent = require_agent()
            address = next(a for a in agent.find("worker1").addresses if a.kind == kind)
            latencies(0.2)
            for flood in (*FLOODS, half_encrypted) if options.tls else FLOODS:
                alone = p99(latencies(seconds))
                with sink(address) as nobody, flooded(flood, nobody):
                    elsewhere = p99(latencies(seconds))
                with flooded(flood, address):
                    here = p99(latencies(seconds))
                    dials = []
                    for _ in range(DIALS):
                        with contextlib.suppress(OSError, telegrad.errors.TelegradError):
                            dials.append(dial_anew(agent, address))
                shown = "".join(f"{value * 1e3:>9.2f} ms" for value in (alone, elsewhere, here, here - elsewhere))
                slowest = f"{max(dials) * 1e3:.0f} ms, median {statistics.median(dials) * 1e3:.0f}" if dials else "-"
                print(f"{title + ', ' + flood.__name__:<28}{shown}   {len(dials)} of {DIALS}, {slowest}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main("--quick" in sys.argv, [word for word in sys.argv[1:] if word != "--quick"]))
