"""An agent among strangers: whoever cannot prove itself is refused with a log line, and nothing else is disturbed."""

import contextlib
import gc
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from telegrad import rpc
from telegrad.errors import AuthenticationError, SerializationError
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.peers.accept import MAX_HALF_OPEN
from telegrad.transport.addresses import Address, connect
from telegrad.transport.handshake import DiallerHandshake, Hello
from telegrad.transport.stream import receive_exactly
from telegrad.wire.block_notices import ReleaseBlocks
from telegrad.wire.frames import HEADER, LENGTHS, MAGIC, VERSION, WHOLE, WITH_MEMORY, FrameKind, encode_prefix
from telegrad.wire.messages import Ack, PythonCall
from tests.one_frame import receive_frame
from tests.waiting import wait_until


@pytest.fixture(params=["unix", "tcp"])
def agent(request: pytest.FixtureRequest, tmp_path: object) -> Iterator[Agent]:
    """A worker alone in its job."""
    options = rpc.RpcBackendOptions(
        init_method=f"file://{tmp_path}/meeting", transports=(request.param,), secret="told to all", heartbeat=0.2
    )
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        yield require_agent()
    finally:
        rpc.shutdown(graceful=False)


def stranger(agent: Agent) -> socket.socket:
    """A connection to the worker that has said nothing yet."""
    (address,) = agent.member.addresses
    return connect(address, 60.0)


def still_works() -> None:
    assert rpc.rpc_sync("alone", os.getpid) == os.getpid()


def closed_by_peer(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


REFUSED = {
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not this protocol"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), "not this protocol"),
    "another version": (b"TGRD\x63" + bytes(32), "version 99"),
    "no proof": (DiallerHandshake(b"").opening + bytes(100), "does not know this job's secret"),
}


@pytest.mark.parametrize("who", REFUSED)
def test_strangers_are_refused(agent: Agent, who: str, caplog: pytest.LogCaptureFixture) -> None:
    said, why = REFUSED[who]
    with caplog.at_level(logging.WARNING, "telegrad"), stranger(agent) as sock:
        sock.sendall(said)
        assert closed_by_peer(sock)
        wait_until(lambda: any(why in m for m in caplog.messages))
    assert len(refusals(caplog)) == 1
    still_works()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("refused a connection")]


def test_one_who_leaves_in_the_middle(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "telegrad"):
        for said in (b"", b"TG", DiallerHandshake(b"x").opening):
            with stranger(agent) as sock:
                sock.sendall(said)
        wait_until(lambda: len(refusals(caplog)) == 3)
    still_works()


def test_a_flood_of_half_open_connections(agent: Agent) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(MAX_HALF_OPEN + 50):
            silent.enter_context(stranger(agent))
        with member(agent) as sock:  # one of ours still gets in
            assert sock.fileno() >= 0
        still_works()
        assert len(agent.connector._acceptor._half_open) <= MAX_HALF_OPEN


def test_out_of_descriptors_for_a_while(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """A connection that cannot be accepted is accepted later, and is not tried for again and again meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    still_works()  # what it needs descriptors for is open now
    gc.collect()  # a store of torch's needs one to end, and ends the process if there is none
    with caplog.at_level(logging.WARNING, "telegrad"), contextlib.ExitStack() as stack:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest_free() + 1, limits[1]))
            stack.enter_context(stranger(agent))  # takes the last descriptor
            wait_until(lambda: caplog.text.count("cannot accept") >= 2)
            start, count = time.monotonic(), caplog.text.count("cannot accept")
            wait_until(lambda: caplog.text.count("cannot accept") >= count + 2)
            assert time.monotonic() - start > 0.09
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: len(agent.connector._acceptor._half_open) == 1)
    still_works()


def _lowest_free() -> int:
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def test_the_wrong_secret_on_the_dialling_side(agent: Agent) -> None:
    agent.connector.secret, right = b"another", agent.connector.secret
    try:
        with pytest.raises(AuthenticationError, match="'alone'"):
            rpc.rpc_sync("alone", os.getpid, timeout=60)
    finally:
        agent.connector.secret = right
    still_works()


@contextlib.contextmanager
def member(agent: Agent, incarnation: int = 77) -> Iterator[socket.socket]:
    """A connection that knows the secret: it can send anything."""
    with stranger(agent) as sock:
        handshake = DiallerHandshake(b"told to all")
        sock.sendall(handshake.opening)
        hello = Hello(5, "impostor", incarnation, agent.member.incarnation, 1, False, "main")
        sock.sendall(handshake.answer(receive_exactly(sock, handshake.opening_answer_bytes), hello))
        code, length = handshake.verdict_length(receive_exactly(sock, handshake.verdict_header_bytes))
        handshake.verdict(code, receive_exactly(sock, length))
        yield sock


def frame(message: object, kind: int = FrameKind.REQUEST, **more: int) -> bytes:
    return encode_prefix(kind, 1, 0, message, (), (), **more)


NONSENSE = {
    "garbage": b"\xff" * 100,
    "unknown form": HEADER.pack(MAGIC, VERSION, 77, 1) + b"x",
    "unknown kind": frame(Ack(), 77),
    "unknown message": HEADER.pack(MAGIC, VERSION, WHOLE, 7) + b"\x94\x01\x01\x00\x91\xcd\x03",
    "oversized": HEADER.pack(MAGIC, VERSION, WITH_MEMORY, 10) + LENGTHS.pack(2**62, 0),
    "not lent": frame(ReleaseBlocks((3,)), FrameKind.NOTICE),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_closes_that_connection_only(agent: Agent, what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "telegrad"), member(agent) as sock:
        sock.sendall(NONSENSE[what])
        if what == "not lent":  # nothing was ever lent without shared memory, so there is nothing to get wrong
            sock.sendall(NONSENSE["garbage"])
        assert closed_by_peer(sock)
        wait_until(lambda: any("impostor" in m for m in caplog.messages))
    still_works()


@pytest.mark.parametrize(
    "call",
    [
        frame(PythonCall(7, b"")),  # a number that was never defined
        frame(PythonCall(8, b"not a pickle")),
        frame(PythonCall(0, b""), payload_bytes=3) + b"abc",
        frame(PythonCall(0, b"")),
        frame(Ack()),  # a request that is none
    ],
    ids=["undefined", "bad definition", "bad payload", "no payload", "no handler"],
)
def test_bad_requests_are_answered(agent: Agent, call: bytes) -> None:
    with member(agent) as sock:
        sock.sendall(call)
        assert receive_frame(sock).kind == FrameKind.FAILURE
    still_works()


def test_a_truncated_request_harms_nobody(agent: Agent) -> None:
    with member(agent) as sock:
        sock.sendall(frame(PythonCall(0, b""), payload_bytes=1000) + b"only this")
    still_works()


def test_a_message_over_the_limit_fails_its_call(tmp_path: object) -> None:
    options = rpc.RpcBackendOptions(
        init_method=f"file://{tmp_path}/meeting", max_message_bytes=100_000, shared_memory=False
    )
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with pytest.raises(SerializationError, match=r"over the limit of 100000.*max_message_bytes"):
            rpc.rpc_sync("alone", len, (b"x" * 200_000,), timeout=60)
        with pytest.raises(SerializationError, match="over the limit of 100000"):
            rpc.rpc_sync("alone", bytes, (200_000,), timeout=60)
        still_works()
        wait_until(lambda: not require_agent().under_way())  # the thread that answered may have a last line to run
    finally:
        rpc.shutdown(graceful=False)


def test_without_a_secret_only_loopback_is_listened_on(tmp_path: object) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meeting", host="0.0.0.0")
    with pytest.raises(AuthenticationError, match=r"no secret.*TELEGRAD_SECRET.*insecure=True"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meeting")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        hosts = [a.host for a in require_agent().member.addresses if isinstance(a, Address) and a.kind == "tcp"]
        assert hosts == ["127.0.0.1"]
    finally:
        rpc.shutdown()
