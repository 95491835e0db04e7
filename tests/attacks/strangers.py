"""What the attackers of these tests do: run as another user, authenticate by hand, say anything over a connection."""

import contextlib
import itertools
import json
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from telegrad.ids import MAX_GENERATION, Incarnation, WorkerId, draw_incarnation
from telegrad.rpc.agent import Agent
from telegrad.rpc.workers import Member as JobMember
from telegrad.rref.rref_context import rrefs_of
from telegrad.transport.addresses import Address, connect
from telegrad.transport.handshake import DiallerHandshake, Hello
from telegrad.transport.stream import make_lane_pair, pass_lane, receive_exactly
from telegrad.wire.codec import Packed
from telegrad.wire.frames import FrameKind, encode_prefix, encode_whole
from telegrad.wire.tensor.small import describe_small
from tests.one_frame import receive_frame

NOBODY = 65534
PATIENCE = 60.0  # seconds for what a worker does at once, on a machine that does much else
# Each liar was started later than the one before, and than those that tests make by hand. By chance one would now and
# then have the generation of another that has left, and be taken for that one, which is known to be dead.
_generations = itertools.cycle(range(1, MAX_GENERATION + 1))


def as_nobody(function: Callable[[], Any]) -> Any:
    """What `function` returns in a process of another user; raises RuntimeError with its traceback if it fails."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said: tuple[bool, Any] = (True, function())
        except BaseException:
            said = (False, traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(said))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        raw = pipe.read()
    os.waitpid(pid, 0)
    worked, value = pickle.loads(raw)
    if not worked:
        raise RuntimeError(value)
    return value


def address_of(agent: Agent, kind: str) -> Address:
    """Where an agent listens."""
    return next(a for a in agent.member.addresses if a.kind == kind)


class Member:
    """An authenticated connection of one who knows the secret and lies."""

    def __init__(self, sock: socket.socket, lane: socket.socket | None) -> None:
        self.sock = sock
        self.lane = lane
        self._number = 0

    def send(self, message: Any, kind: int = FrameKind.REQUEST, payload: bytes = b"", **more: Any) -> int:
        """Send one message; the number of the request."""
        self._number += 1
        segments = more.pop("segments", ())
        tensors = more.pop("tensors", ())
        raw = encode_prefix(kind, self._number, more.pop("ack", 0), message, tensors, segments, len(payload), **more)
        self.sock.sendall(raw + payload)
        return self._number

    def send_packed(self, message: Any, packed: Packed) -> int:
        """Send a request with small tensors, whose bytes follow it."""
        self._number += 1
        described = describe_small(packed.tensors)
        assert described is not None
        specs, data = described
        self.sock.sendall(encode_whole(FrameKind.REQUEST, self._number, 0, message, packed.payload, specs, data))
        return self._number

    def read(self) -> tuple[int, int]:
        """Kind and number of the next frame; its content is thrown away."""
        kind, number, _ = self.answer()
        return kind, number

    def answer(self) -> tuple[int, int, Any]:
        """Kind, number and message of the next frame."""
        frame = receive_frame(self.sock)
        return frame.kind, frame.request_id, frame.message

    def asks(self, message: Any, packed: Packed | None = None) -> str:
        """Send a request; what is said about it: nothing if it was carried out."""
        number = self.send(message) if packed is None else self.send_packed(message, packed)
        while True:
            kind, answered, said = self.answer()
            if kind != FrameKind.NOTICE:
                assert answered == number
                return said.text if kind == FrameKind.FAILURE else ""


@contextlib.contextmanager
def lying_member(
    agent: Agent,
    *,
    secret: bytes | None = None,
    kind: str = "unix",
    hello: Hello | None = None,
    shared_memory: bool = False,
) -> Iterator[Member]:
    """A connection that proved that it knows the secret."""
    made = hello or Hello(
        5,
        "liar",
        draw_incarnation(next(_generations)),
        agent.member.incarnation,
        1,
        shared_memory,
        "main",
        ticket=bytes(16),
    )
    if agent.options.exports_only and made.name != agent.info.name:  # a party to the job, or it is not let in
        agent.peers.learn([JobMember(made.name, WorkerId(made.worker_id), Incarnation(made.incarnation), (), 0)])
        # It cannot be dialled. When one that lied is replaced, its successor would be asked about references of it,
        # some time later, and be taken for dead.
        rrefs_of(agent).tell = lambda peer, message: None  # type: ignore[method-assign]
    sock = connect(address_of(agent, kind), PATIENCE)
    ours = None
    try:
        handshake = DiallerHandshake(agent.connector.secret if secret is None else secret)
        sock.sendall(handshake.opening)
        sock.sendall(handshake.answer(receive_exactly(sock, handshake.opening_answer_bytes), made))
        if made.shared_memory:
            ours, theirs = make_lane_pair()
            with theirs:
                pass_lane(sock, theirs)
        code, length = handshake.verdict_length(receive_exactly(sock, handshake.verdict_header_bytes))
        handshake.verdict(code, receive_exactly(sock, length))
        yield Member(sock, ours)
    finally:
        sock.close()
        if ours is not None:
            ours.close()


def memory_mb() -> float:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def as_json(value: Any) -> str:
    """For reports that cross a process."""
    return json.dumps(value, default=repr)
