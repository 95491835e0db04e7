"""What the machine itself can do, measured in the same run: the floor under every case.

A round trip is two processes that block in `recv`, 200 bytes each way. Copies are one thread's memcpy, into memory that
was written before and into memory fresh from the kernel. The TCP stream is one process writing, one reading into
touched memory.
"""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection

from benchmarks import apis
from benchmarks.cases import MB, Case
from benchmarks.parent_death import tie_to_harness

MESSAGE = 200
SIZES = (1, 16, 128)  # megabytes: those of the cases
DEADLINE = 20.0


@dataclass(frozen=True)
class Limits:
    """Seconds for a round trip; seconds for one copy of so many megabytes."""

    unix_round_trip: float
    tcp_round_trip: float
    touched_copy: dict[int, float]
    fresh_copy: dict[int, float]
    tcp_copy: dict[int, float]

    def of(self, case: Case) -> float | None:
        """Seconds below which no implementation can bring one operation of the case, where that can be said."""
        floor = case.floor
        if floor is None:
            return None
        over_tcp = case.transport == apis.TCP
        round_trip = self.tcp_round_trip if over_tcp else self.unix_round_trip
        seconds = self.tcp_copy if over_tcp else self.touched_copy
        copies = floor.copies + (floor.returns if over_tcp else 0)
        return floor.round_trips * round_trip + (copies * seconds[floor.megabytes] if copies else 0.0)

    def lines(self) -> list[str]:
        def rates(copies: dict[int, float]) -> str:
            return ", ".join(f"{size} MB {size * MB / seconds / 1e9:.1f} GB/s" for size, seconds in copies.items())

        return [
            f"Unix socket round trip, {MESSAGE} bytes: {self.unix_round_trip * 1e6:.1f} us",
            f"TCP loopback round trip, {MESSAGE} bytes: {self.tcp_round_trip * 1e6:.1f} us",
            f"memcpy into touched memory: {rates(self.touched_copy)}",
            f"memcpy into fresh memory: {rates(self.fresh_copy)}",
            f"TCP loopback into touched memory: {rates(self.tcp_copy)}",
        ]


def measure(quick: bool) -> Limits:
    times = 500 if quick else 3000
    with _partner(socket.AF_UNIX) as unix:
        unix_round_trip = _round_trip(unix, times)
    with _partner(socket.AF_INET) as tcp:
        tcp_round_trip = _round_trip(tcp, times)
        tcp_copy = {size: _median(partial(_stream, tcp, size * MB), 3 if quick else 7) for size in SIZES}
    repeats = 5 if quick else 15
    return Limits(
        unix_round_trip,
        tcp_round_trip,
        {size: _touched_copy(size * MB, repeats) for size in SIZES},
        {size: _fresh_copy(size * MB, repeats) for size in SIZES},
        tcp_copy,
    )


def _median(action: Callable[[], object], repeats: int) -> float:
    action()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _touched_copy(size: int, repeats: int) -> float:
    source, target = bytearray(b"x") * size, memoryview(bytearray(b"y") * size)

    def copy() -> None:
        target[:] = source

    return _median(copy, repeats)


def _fresh_copy(size: int, repeats: int) -> float:
    source = bytearray(b"x") * size

    def copy() -> None:
        with mmap.mmap(-1, size) as target:
            target[:] = source

    return _median(copy, repeats)


@contextmanager
def _partner(family: int) -> Iterator[socket.socket]:
    """A connected socket whose other end is answered by a process of its own; ended on leaving."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs,), daemon=True)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else "")
        listener.listen(1)
        listener.settimeout(DEADLINE)
        process.start()
        theirs.close()
        ours.send((family, listener.getsockname()))
        stream, _ = listener.accept()
    ours.close()
    try:
        with stream:
            yield _ready(stream)
    finally:
        process.join(DEADLINE)
        process.kill()


def _ready(stream: socket.socket) -> socket.socket:
    # The kernel keeps the deadline: Python's own timeout would add a poll to every read, and to the figure.
    stream.settimeout(None)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(DEADLINE), 0))
    if stream.family == socket.AF_INET:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _answer(orders: connection.Connection) -> None:
    """The other end: each message says how many bytes follow; it reads those and sends the message back."""
    tie_to_harness()
    family, address = orders.recv()
    buffer = memoryview(bytearray(max(SIZES) * MB))
    with socket.socket(family, socket.SOCK_STREAM) as stream:
        stream.connect(address)
        _ready(stream)
        header = memoryview(bytearray(MESSAGE))
        while _read(stream, header):
            size = int.from_bytes(header[:8], "little")
            if size:
                _read(stream, buffer[:size])
            stream.sendall(header)


def _read(stream: socket.socket, into: memoryview) -> bool:
    done = 0
    while done < len(into):
        count = stream.recv_into(into[done:])
        if not count:
            return False
        done += count
    return True


def _round_trip(stream: socket.socket, times: int) -> float:
    return _median(partial(_stream, stream, 0), times)


_SOURCE = bytearray()


def _stream(stream: socket.socket, size: int) -> None:
    if len(_SOURCE) < size:
        _SOURCE.extend(b"x" * (size - len(_SOURCE)))
    header = size.to_bytes(8, "little") + bytes(MESSAGE - 8)
    stream.sendall(header)
    if size:
        stream.sendall(memoryview(_SOURCE)[:size])
    _read(stream, memoryview(bytearray(MESSAGE)))
