"""A party that is called and answers with lies, to a worker that exchanges plain data alone: nothing that came is
unpickled, no gradient goes where it should not, and each call ends, by an error or at its deadline.
"""

import contextlib
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import CallRefused, RemoteError, TelegradError
from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import Address
from telegrad.transport.handshake import ListenerHandshake, Welcome
from telegrad.wire.codec import pack_plain
from telegrad.wire.frames import INLINE, FrameKind, SegmentSpec, encode_prefix, encode_whole
from telegrad.wire.messages import (
    AutogradMetadata,
    ExceptionReply,
    PassDone,
    PassDoneWithInputs,
    PythonReply,
    RpcWithAutograd,
    RpcWithAutogradReply,
)
from telegrad.wire.tensor.small import describe_small
from telegrad.wire.tensor.specs import TensorSpec
from tests.attacks.frames import OTHERS, Frames
from tests.attacks.strangers import memory_mb
from tests.cluster import join
from tests.one_frame import receive_frame

OPTIONS: dict[str, Any] = {
    "exports_only": True,
    "secret": "of both parties, which is long",
    "transports": ("tcp",),
    "heartbeat": 5.0,  # the liar counts as a worker of another host: silent for three of these, it is given up
}
SHORT, LONG = 150, 3000
X = torch.ones(1, 3)

Answer = Callable[[int, Any], bytes]  # to a request and its message: what is sent back


class Server:
    """A worker of the job that answers as it likes."""

    def __init__(self, agent: Agent) -> None:
        self.answer: Answer = lambda number, _: _reply(number, PythonReply(), X)
        self.asked: list[Any] = []
        self._agent = agent
        self._listener = socket.create_server(("127.0.0.1", 0))
        where = Address("tcp", "127.0.0.1", str(self._listener.getsockname()[1]))
        self.member = Member("liar", WorkerId(5), Incarnation((1 << 30) + 1), (where,), 0)
        self._socks = [self._listener]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        handshake = ListenerHandshake(self._agent.connector.secret)
        with contextlib.suppress(OSError, ValueError):
            while handshake.hello is None:
                sock.sendall(handshake.feed(sock.recv(handshake.needs)))
            member = self.member
            welcome = Welcome(member.worker_id, member.name, member.incarnation, False, False, "")
            sock.sendall(handshake.welcome(welcome))
            while True:
                frame = receive_frame(sock)
                if frame.kind == FrameKind.REQUEST:
                    self.asked.append(frame.message)
                    sock.sendall(self.answer(frame.request_id, frame.message))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._accepting.join(5)
        for sock in self._socks:
            sock.close()


def _reply(number: int, message: Any, *tensors: torch.Tensor, payload: bytes | None = None) -> bytes:
    packed = pack_plain(tensors[0] if tensors else None)
    described = describe_small(list(tensors))
    specs, data = described or ((), b"")
    chosen = packed.payload if payload is None else payload
    return bytes(encode_whole(FrameKind.REPLY, number, 0, message, chosen, specs, data))


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    join("alone", 0, 1, f"file://{tmp_path_factory.mktemp('servers')}/meeting", OPTIONS)
    try:
        yield require_agent()
    finally:
        rpc.shutdown(graceful=False)


@pytest.fixture
def server(agent: Agent) -> Iterator[Server]:
    made = Server(agent)
    made.member = msgspec.structs.replace(made.member, incarnation=Incarnation(_next_incarnation()))
    agent.peers.learn([made.member])
    try:
        yield made
    finally:
        made.close()


_generation = iter(range(1, 1000))


def _next_incarnation() -> int:
    generation = next(_generation)
    return (random.getrandbits(40) << 10) | generation


def _call(x: torch.Tensor = X) -> Any:
    return rpc.rpc_sync("liar", "anything", (x,), timeout=60)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_that_came_back_is_unpickled(server: Server, tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    bomb = b"\x05" + pickle.dumps(_Bomb(exploded))
    failure = ExceptionReply("liar", "ValueError", "text", "")
    answers: list[Answer] = [
        lambda number, _: _reply(number, PythonReply(), payload=bomb),
        lambda number, _: encode_prefix(FrameKind.FAILURE, number, 0, failure, (), (), len(bomb)) + bomb,
    ]
    for server.answer in answers:
        with pytest.raises(TelegradError):
            _call()
        assert not exploded.exists()


def test_an_error_has_no_lines_of_its_own(server: Server) -> None:
    """It could show itself as anything, to whoever reads the log or the terminal."""
    said = ExceptionReply("alone", "Value\x1b[2JError", "x\x1b[31m\nINFO all is well" + "y" * 10_000, "in\nmany lines")
    server.answer = lambda number, _: encode_whole(FrameKind.FAILURE, number, 0, said)
    with pytest.raises(RemoteError) as caught:
        _call()
    text = str(caught.value)
    assert text.isprintable() and len(text) < 3000 and "on worker 'liar'" in text
    assert not getattr(caught.value, "__notes__", [])


def test_a_result_that_is_repeated_without_end(server: Server) -> None:
    """Four bytes that say they are a terabyte: whoever computes with that ends there."""
    spec = TensorSpec(0, 0, (1 << 38,), (0,), 0, 0, 0)
    raw = pack_plain(X).payload
    prefix = partial(encode_prefix, tensors=(spec,), segments=(SegmentSpec(4, INLINE, 0),), payload_bytes=len(raw))
    server.answer = lambda number, _: prefix(FrameKind.REPLY, number, 0, PythonReply(), data_bytes=4) + raw + bytes(4)
    with pytest.raises(CallRefused, match=r"max_message_bytes.*1099511627776 bytes"):
        _call()
    with pytest.raises(CallRefused, match="max_message_bytes"):
        rpc.rpc_async("liar", "anything", (X,), timeout=60).wait()
    bomb = b"\x03\x01\x00\x91\xdd" + (2 << 20).to_bytes(4, "big") + b"\x90" * (2 << 20)
    server.answer = lambda number, _: encode_prefix(FrameKind.REPLY, number, 0, PythonReply(), (), (), len(bomb)) + bomb
    with pytest.raises(CallRefused, match=r"max_message_bytes.*values"):
        _call()


def test_a_reply_names_messages_of_its_sender_alone(server: Server) -> None:
    """Else it would stand in the place of another party's, and that would wait for its gradient in vain."""
    y = X.clone().requires_grad_()

    def answer(number: int, message: Any) -> bytes:
        assert type(message) is RpcWithAutograd
        metadata = AutogradMetadata(message.metadata.context_id, (6 << 48) + 1)  # type: ignore[arg-type]
        return _reply(number, RpcWithAutogradReply(metadata, PythonReply(), ()), y)

    server.answer = answer
    with autograd.context(), pytest.raises(TelegradError, match="message of another"):
        _call()


@pytest.mark.parametrize("with_inputs", [False, True])
def test_gradients_for_what_it_was_not_sent(server: Server, with_inputs: bool) -> None:
    """In the answer to a pass, for a message that went to another, or for none."""
    x = torch.ones(1, 3, requires_grad=True)

    def answer(number: int, message: Any) -> bytes:
        if type(message) is RpcWithAutograd:
            metadata = AutogradMetadata(message.metadata.context_id, (5 << 48) + 1)  # type: ignore[arg-type]
            return _reply(number, RpcWithAutogradReply(metadata, PythonReply(), ()), X.clone().requires_grad_())
        done = PassDone((), (((6 << 48) + 3, (True,)),))  # type: ignore[arg-type]
        return _reply(number, PassDoneWithInputs(done, (0,)) if with_inputs else done, X * 7, payload=b"")

    server.answer = answer
    with autograd.context() as context_id:
        y = _call(x)
        with pytest.raises(TelegradError):
            autograd.backward(context_id, [(y * x).sum()], timeout=1)
        assert not autograd.get_gradients(context_id)


def _whatever(seed: int, server: Server) -> Answer:
    frames = Frames(seed, server.member.incarnation)
    source = frames.random

    def answer(number: int, message: Any) -> bytes:
        kind = source.choice((FrameKind.REPLY, FrameKind.REPLY, FrameKind.REPLY, FrameKind.FAILURE, FrameKind.NOTICE))
        made = frames._message(source.choice(_ANSWERS) if source.random() < 0.5 else source.choice(OTHERS))
        specs, segments, data = frames._tensors() if source.random() < 0.4 else ((), (), b"")
        payload = frames._payload()
        about = number if source.random() < 0.9 else source.choice((0, 1, number - 1, number + 1, 2**63))
        return encode_prefix(kind, about, 0, made, specs, segments, len(payload), len(data)) + payload + data

    return answer


_ANSWERS = (PythonReply, RpcWithAutogradReply, PassDone, PassDoneWithInputs, ExceptionReply)


@pytest.mark.slow
@pytest.mark.chaos
def test_any_answer(agent: Agent, server: Server, long_profile: bool) -> None:
    """Answers of every kind to calls, references and passes."""
    source = random.Random(7)
    honest, server.answer = server.answer, _whatever(7, server)
    before, refused = memory_mb(), 0
    for _ in range(LONG if long_profile else SHORT):
        chance = source.random()
        begun = time.monotonic()
        try:
            x = torch.ones(1, 3, requires_grad=True)
            if chance < 0.3:
                rpc.rpc_sync("liar", "anything", (X,), timeout=0.05)
            elif chance < 0.5:
                rpc.remote("liar", "anything", (X,), timeout=0.05).to_here(timeout=0.05)
            else:
                with autograd.context() as context_id:
                    y = rpc.rpc_sync("liar", "anything", (x,), timeout=0.05)
                    autograd.backward(context_id, [(x if not torch.is_tensor(y) else y).sum()], timeout=0.05)
        except Exception as error:
            refused += isinstance(error, TelegradError)
        assert time.monotonic() - begun < 60, "a call outlived its deadline"
    assert refused > 20 and memory_mb() - before < 100
    server.answer = honest
    assert torch.equal(rpc.rpc_sync("liar", "anything", (X,), timeout=60), X)
