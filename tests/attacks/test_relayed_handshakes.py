"""A relay that knows no secret and changes what two workers say in their handshake (2).

Once it led a worker that believed in a forged restart to the true worker, by writing another incarnation into the
handshake, and its own replies were unpickled from then on.
"""

import hashlib
from collections.abc import Iterator

import msgspec
import pytest
import torch

from telegrad import rpc
from telegrad.errors import AuthenticationError, RpcTimeout, WorkerDied
from telegrad.rpc.current import require_agent
from telegrad.transport import handshake
from telegrad.transport.handshake import ACCEPTED, Hello, Welcome
from tests.attacks.relay import Relay, believe, call, member_of, tcp_of
from tests.cluster import cluster

SECRET = "told to all, and long"
OPENING, ANSWER, VERDICT = handshake._OPENING.size, handshake._ANSWER, handshake._VERDICT
X = torch.full((16,), 1.2345678)


class Rewriter:
    """Changes the hello that a dialler says, and what the worker answers to it; the rest passes."""

    def __init__(self, wanted: int, claimed: int, how: str, rewrote: list[str]) -> None:
        self._wanted, self._claimed, self._how = wanted, claimed, how
        self._rewrote = rewrote
        self._said = {True: b"", False: b""}
        self._done = {True: False, False: False}

    def __call__(self, to_worker: bool, data: bytes) -> bytes:
        if self._done[to_worker]:
            return data
        self._said[to_worker] = said = self._said[to_worker] + data
        opening = OPENING if to_worker else OPENING + handshake.PROOF_BYTES
        layout = ANSWER if to_worker else VERDICT
        if len(said) == opening:
            return said
        if len(said) < opening + layout.size:
            return b""
        head, body = said[opening : opening + layout.size], said[opening + layout.size :]
        if len(body) < layout.unpack(head)[-1]:
            return b""
        self._done[to_worker] = True
        return self._hello(head, body) if to_worker else self._verdict(head, body)

    def _hello(self, head: bytes, body: bytes) -> bytes:
        if self._how == "verdict":
            return head + body
        self._rewrote.append("hello")
        hello = msgspec.msgpack.decode(body, type=Hello)
        body = msgspec.msgpack.encode(msgspec.structs.replace(hello, wanted_incarnation=self._wanted))
        proof, digest, _ = ANSWER.unpack(head)
        if self._how == "hello and digest":
            digest = hashlib.sha256(body).digest()
        return ANSWER.pack(proof, digest, len(body)) + body

    def _verdict(self, head: bytes, body: bytes) -> bytes:
        self._rewrote.append("verdict")
        proof = VERDICT.unpack(head)[0]
        body = msgspec.msgpack.encode(Welcome(1, "worker1", self._claimed, False, False, "main"))
        return VERDICT.pack(proof, ACCEPTED, len(body)) + body


@pytest.fixture(scope="module")
def plain() -> Iterator[None]:
    """Workers of a job with a secret, whose connections are not encrypted."""
    with cluster(3, transports=("tcp",), tls=False, secret=SECRET, heartbeat=5.0):
        true = [member_of(name) for name in ("worker1", "worker2")]
        yield
        for member in true:
            believe(member)


@pytest.mark.parametrize("how", ["hello", "hello and digest", "verdict"])
@pytest.mark.parametrize("to", ["worker1", "worker2"])
def test_a_relay_that_rewrites_the_wanted_incarnation(plain: None, how: str, to: str) -> None:
    """worker0 believes that worker1 was started again; the relay leads it to the true one, or to another worker."""
    true, led_to = member_of("worker1"), member_of(to)
    forged_incarnation = true.incarnation + 1
    rewrote: list[str] = []
    options = require_agent().options
    relay = Relay(tcp_of(led_to), change=lambda: Rewriter(led_to.incarnation, forged_incarnation, how, rewrote))
    forged = msgspec.structs.replace(true, incarnation=forged_incarnation, addresses=(relay.address,))
    try:
        for options.connect_timeout in (0.5, 4.0, 8.0):  # until this machine is fast enough for a handshake meanwhile
            believe(forged)
            with pytest.raises((AuthenticationError, WorkerDied, RpcTimeout)):
                call(forged, torch.neg, X)
            if rewrote:
                break
        assert rewrote, "the relay was not in the middle of a handshake"
        assert X.numpy().tobytes() not in relay.saw, "the call was sent into a connection that was led astray"
    finally:
        options.connect_timeout = 10.0
        believe(true)
        relay.close()
    assert torch.equal(rpc.rpc_sync(to, torch.neg, (X,)), -X)
