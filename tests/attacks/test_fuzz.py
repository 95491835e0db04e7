"""A fuzzer that knows the secret: real frames of every message with something wrong, to a worker with all its layers.

Nothing may crash, hang or leak, and honest calls go on. A short run here; `make chaos` sends a million frames.
"""

import contextlib
import logging
import multiprocessing
import os
import random
import select
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from telegrad import autograd, rpc
from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.current import require_agent
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import connect
from telegrad.transport.handshake import DiallerHandshake, Hello
from telegrad.transport.stream import receive_exactly
from telegrad.wire import block_notices, messages
from telegrad.wire.codec import EMPTY_CALL
from telegrad.wire.frames import FrameKind, encode_whole
from telegrad.wire.messages import PythonCall
from tests.attacks.frames import MESSAGES, Frames
from tests.attacks.strangers import PATIENCE
from tests.cluster import end, join, process
from tests.one_frame import receive_frame
from tests.waiting import wait_until

SECRET = "known to the one who lies"
SHORT, LONG = 4_000, 1_000_000
CHECK_EVERY = 50_000
_BATCH = 10
_PER_CONNECTION = 40 * _BATCH
_PAUSE = 0.02  # seconds at most for a worker to answer some of a batch, so that it is not left behind


def alive() -> int:
    return os.getpid()


def victim(folder: str, exports_only: bool, orders: Connection) -> None:
    """The worker under attack: it says who it is, and ends gracefully when it is told."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    assert autograd is not None
    rpc.export(alive)
    limits = rpc.Limits(calls_per_second=1e9, running=10_000)
    options = {
        "secret": SECRET,
        "exports_only": exports_only,
        "limits": limits,
        "rpc_timeout": 2.0,
        "max_message_bytes": 1 << 16,
    }
    join("victim", 0, 1, f"file://{folder}/meeting", options)
    agent = require_agent()
    orders.send(msgspec.msgpack.encode(agent.member))
    while (order := orders.recv()) != b"end":  # a party to the job, or a worker that trusts nobody does not let it in
        agent.peers.learn(msgspec.msgpack.decode(order, type=list[Member]))
        orders.send(b"known")
    rpc.shutdown(timeout=PATIENCE)
    orders.send(b"ended")


class Attacker:
    """One connection after the other to the worker."""

    def __init__(self, member: Member, seed: int, orders: Connection | None) -> None:
        """`orders` puts it on record, where that is asked for."""
        self.member = member
        self._orders = orders
        self._on_record: list[Member] = []
        self.seed = seed
        self.sent = 0
        self.connections = 0
        self.received = 0  # bytes of answers
        self._incarnations = random.Random(seed)
        self._sock: socket.socket | None = None
        self.frames = Frames(seed, 0)

    def dial(self) -> socket.socket:
        """An authenticated connection, each under a name of its own: what one has done wrong is forgotten with it."""
        worker_id, incarnation = 5 + self.connections, Incarnation(self._incarnations.getrandbits(40))
        name = f"fuzz{worker_id}"
        if self._orders is not None:
            left = [msgspec.structs.replace(member, leaving=True) for member in self._on_record]
            self._on_record = [Member(name, WorkerId(worker_id), incarnation, (), 0)]
            self._orders.send(msgspec.msgpack.encode(left + self._on_record))
            assert self._orders.poll(PATIENCE) and self._orders.recv() == b"known"
        address = next(a for a in self.member.addresses if a.kind == "unix")
        until = time.monotonic() + PATIENCE
        while True:  # a worker that has no room for a while says so
            sock = connect(address, PATIENCE)
            try:
                handshake = DiallerHandshake(SECRET.encode())
                sock.sendall(handshake.opening)
                hello = Hello(worker_id, name, incarnation, self.member.incarnation, 1, False, "", ticket=bytes(16))
                sock.sendall(handshake.answer(receive_exactly(sock, handshake.opening_answer_bytes), hello))
                code, length = handshake.verdict_length(receive_exactly(sock, handshake.verdict_header_bytes))
                handshake.verdict(code, receive_exactly(sock, length))
            except (AuthenticationError, ProtocolError, OSError):
                sock.close()
                if time.monotonic() > until:
                    raise
            else:
                self.connections += 1
                self.frames = Frames(self.seed + self.connections, incarnation, worker_id)
                return sock

    def attack(self, frames: int) -> None:
        """Send so many frames more."""
        goal = self.sent + frames
        while self.sent < goal:
            if self._sock is None:
                self._sock = self.dial()
            elif self.sent % _PER_CONNECTION == 0:  # one that announces much and sends little swallows what follows
                self.hang_up()
                continue
            batch = [self.frames.next()[0] for _ in range(_BATCH)]
            self.sent += _BATCH
            try:
                self._send(self._sock, b"".join(batch))
                self._read(self._sock, _PAUSE)
            except OSError:
                self.hang_up()

    def _send(self, sock: socket.socket, raw: bytes) -> None:
        """Send, and read what comes meanwhile. TimeoutError if the worker takes nothing in for too long."""
        view = memoryview(raw)
        sock.setblocking(False)
        until = time.monotonic() + PATIENCE
        while view:
            _, writable, _ = select.select([sock], [sock], [], 1.0)
            self._read(sock, 0.0)
            if writable:
                view = view[sock.send(view) :]
                until = time.monotonic() + PATIENCE
            assert time.monotonic() < until, "the worker reads nothing any more"

    def _read(self, sock: socket.socket, seconds: float) -> None:
        """Read what there is, and wait so long for something."""
        while select.select([sock], [], [], seconds)[0]:
            answers = sock.recv(1 << 16)
            if not answers:
                raise ConnectionResetError
            self.received += len(answers)
            seconds = 0.0

    def hang_up(self) -> None:
        """End the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def honest_call(self) -> None:
        """One that keeps to the protocol is served."""
        from telegrad.rpc.trust.exports import definition_of

        with self.dial() as sock:
            sock.settimeout(PATIENCE)
            sock.sendall(
                encode_whole(FrameKind.REQUEST, 1, 0, PythonCall(1, definition_of("alive")), EMPTY_CALL.payload)
            )
            while True:
                frame = receive_frame(sock)
                if frame.kind == FrameKind.REPLY:
                    return
                assert frame.kind == FrameKind.NOTICE


def footprint(pid: int) -> dict[str, float]:
    """What the worker has of memory, descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "MB": int(status["VmRSS"].split()[0]) / 1024,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def settled(pid: int, files: float) -> dict[str, float]:
    """The same once it has no more threads and descriptors than it may: what was just closed is still there."""
    wait_until(lambda: (found := footprint(pid))["threads"] < 150 and found["files"] < files)
    return footprint(pid)


def run(folder: Path, frames: int, exports_only: bool, seed: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = process(victim, str(folder), exports_only, theirs)
    theirs.close()
    try:
        assert ours.poll(PATIENCE), "the worker has not come up"
        attacker = Attacker(msgspec.msgpack.decode(ours.recv(), type=Member), seed, ours if exports_only else None)
        attacker.honest_call()
        assert worker.pid is not None
        attacker.attack(min(frames // 4, CHECK_EVERY))  # tables that are filled once
        before = footprint(worker.pid)
        while attacker.sent < frames:
            attacker.attack(min(CHECK_EVERY, frames - attacker.sent))
            attacker.honest_call()
            now = settled(worker.pid, before["files"] + 50)
            shown = f"{attacker.sent} frames in {attacker.connections} connections, {attacker.received} bytes answered"
            print(f"{shown}: {now}", flush=True)
            assert worker.is_alive()
        attacker.hang_up()
        assert attacker.received > 10 * attacker.sent, f"answers were few: {attacker.received} bytes"
        assert footprint(worker.pid)["MB"] - before["MB"] < 60 + 40 * (frames / 100_000), "it grows with what is sent"
        ours.send(b"end")
        assert ours.poll(2 * PATIENCE) and ours.recv() == b"ended", "it did not end gracefully"
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            end([worker], patience=30)


def test_every_message_is_fuzzed() -> None:
    source = Frames(1, 1)
    seen = {source.next()[1] for _ in range(50_000)}
    assert seen == set(MESSAGES)
    exist = {c for m in (messages, block_notices) for c in vars(m).values() if isinstance(c, type)}
    tagged = {c for c in exist if issubclass(c, msgspec.Struct) and c.__struct_config__.tag is not None}
    assert tagged == set(MESSAGES), "a message that no connection would decode, or one that is not fuzzed"


@pytest.mark.slow
@pytest.mark.parametrize("exports_only", [False, True], ids=["trusting", "exports"])
def test_an_authenticated_fuzzer(tmp_path: Path, exports_only: bool) -> None:
    run(tmp_path, SHORT, exports_only, seed=17)


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.parametrize("exports_only", [False, True], ids=["trusting", "exports"])
def test_a_million_frames(tmp_path: Path, exports_only: bool) -> None:
    run(tmp_path, LONG // 2, exports_only, seed=random.getrandbits(32))
