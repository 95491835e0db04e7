"""A worker goes on reading what a caller asks while its replies to that caller cannot be written, and one thread at a
time does so."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad import rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.request import Request
from telegrad.rpc.server.session import Session
from telegrad.rpc.threads.spin import Spinner
from telegrad.rpc.threads.yield_turn import local
from telegrad.transport.stream import SocketStream
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame, FrameKind, encode_prefix
from telegrad.wire.messages import Ack, Ping
from tests.attacks.strangers import Member, lying_member
from tests.waiting import wait_until

REPLY = 20_000  # bytes: small enough to be held back for others, and many of them fill a socket


class Serving:
    """A worker whose answers to pings are long, and a caller of it that reads when the test does."""

    def __init__(self, agent: Agent, caller: Member) -> None:
        self.caller = caller
        self.session: Session = next(s for s in agent.peers.sessions() if s.member.name == "liar")
        self.served: list[int] = []
        self._last = 0
        self._asked: set[int] = set()
        agent.layers.served[Ping] = agent.layers.served[Ping]._replace(handler=self._answer)

    def _answer(self, request: Request) -> None:
        self.served.append(request.frame.request_id)
        request.reply(Ack(), Packed(bytes(REPLY), []))

    def ask(self, count: int, *, then_a_notice: bool = False) -> None:
        """Send so many requests in one write, so that they are read together; a notice behind them has no reply."""
        raw = b""
        for _ in range(count):
            self._last += 1
            self._asked.add(self._last)
            raw += encode_prefix(FrameKind.REQUEST, self._last, 0, Ping())
        if then_a_notice:
            raw += encode_prefix(FrameKind.NOTICE, 0, 0, Ack())
        self.caller.sock.sendall(raw)

    def read_all(self) -> None:
        """Read the answers to all that was asked."""
        while self._asked:
            self._asked.discard(self.caller.read()[1])


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meeting")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        agent = require_agent()
        with lying_member(agent) as caller:
            caller.sock.settimeout(40.0)
            wait_until(lambda: any(s.member.name == "liar" for s in agent.peers.sessions()))
            yield Serving(agent, caller)
    finally:
        rpc.shutdown(graceful=False)


def test_requests_are_read_while_another_thread_writes(serving: Serving) -> None:
    """The replies that were held back wait for a message that another thread cannot finish."""
    connection = serving.session.connection
    assert connection is not None
    with connection._write_lock:
        serving.ask(2, then_a_notice=True)
        wait_until(lambda: len(serving.served) == 2)
        serving.ask(1)
        wait_until(lambda: len(serving.served) == 3)
    connection.flush()  # as a thread does that has written
    serving.read_all()


def test_one_thread_reads_after_another_had_to_wait(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that wrote for long must not read beside the one that took over from it."""
    session, connection = serving.session, serving.session.connection
    assert connection is not None and isinstance(connection.stream, SocketStream)
    connection.stream._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * REPLY)
    monkeypatch.setattr(Spinner, "wait", lambda self, ready, *_: ready(0.5))  # long enough to read what comes next
    receive, out_of_turn = connection.receive, []

    def receive_in_turn() -> list[Frame] | None:
        if local.turn is not session._turn:
            out_of_turn.append(local.turn)
        return receive()

    connection.receive = receive_in_turn  # type: ignore[method-assign]
    for _ in range(10):
        before = len(serving.served)
        serving.ask(20, then_a_notice=True)  # their answers are held back, then written, and too long for the socket
        wait_until(lambda before=before: len(serving.served) == before + 20)
        serving.read_all()
        serving.ask(3)
        serving.read_all()
    assert not out_of_turn


def test_a_reply_is_not_held_back_for_those_that_another_thread_writes(serving: Serving) -> None:
    """A thread is slow, between its look at what waits behind its request and holding back the reply for that."""
    session, connection = serving.session, serving.session.connection
    assert connection is not None
    send_encoded = connection.send_encoded

    def hold_late(frame: bytes, deadline: float | None = None, hold: bool = False) -> None:
        if hold:
            turn = local.turn
            wait_until(lambda: session._turn is not turn)  # the timer has found it stuck
            wait_until(lambda: len(serving.served) == 2 and session._turn is None)
        send_encoded(frame, deadline, hold)

    connection.send_encoded = hold_late  # type: ignore[method-assign]
    serving.ask(2)
    serving.read_all()
