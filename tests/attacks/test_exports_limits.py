"""A party that knows the secret and lies, at a worker that runs exported functions alone: each way around a limit."""

import contextlib
import itertools
import json
import logging
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.autograd.registry import registry_of
from telegrad.errors import AuthenticationError
from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent
from telegrad.rpc.peers.peers import MOST_OF_ONE
from telegrad.rpc.trust.exports import definition_of
from telegrad.rpc.trust.guard import Guard
from telegrad.rpc.workers import Member
from telegrad.rref.rref_context import rrefs_of
from telegrad.transport.addresses import connect
from telegrad.transport.handshake import DiallerHandshake, Hello
from telegrad.transport.stream import receive_exactly
from telegrad.wire.codec import EMPTY_CALL, pack
from telegrad.wire.frames import INLINE, FrameKind, SegmentSpec, encode_prefix
from telegrad.wire.messages import (
    AbortPass,
    AnyMessage,
    AutogradMetadata,
    BeginPass,
    CancelCall,
    CleanupAutogradContext,
    Goodbye,
    ParticipantDied,
    PythonCall,
    PythonRemoteCall,
    RpcWithAutograd,
    RRefCreationFailed,
    RRefFetch,
    RRefUserDelete,
)
from telegrad.wire.tensor.specs import TensorSpec
from tests.attacks.frames import Frames
from tests.attacks.strangers import PATIENCE, address_of, lying_member, memory_mb
from tests.cluster import join
from tests.waiting import wait_until

OWN = 5 << 48
LIMITS = rpc.Limits(running=10, references=4, contexts=4, context_calls=5, kept_bytes=1 << 20, calls_per_second=1e6)
OPTIONS: dict[str, Any] = {"exports_only": True, "secret": "of both parties, which is long", "limits": LIMITS}
WEIGHT = torch.ones(3, 3, requires_grad=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the audit of the worker is, which is this process: the liars of all tests connect to it."""
    made = tmp_path_factory.mktemp("limits")
    for function in (forward, sleep_until, zeros, rows_of_weight):
        rpc.export(function)
    join("alone", 0, 1, f"file://{made}/meeting", {**OPTIONS, "audit": f"{made}/audit"})
    try:
        yield made
    finally:
        rpc.shutdown(graceful=False)
        for name in ("forward", "sleep_until", "zeros", "rows_of_weight"):
            rpc.withdraw(name)


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    """The worker; another party is served after each test as if nothing had been."""
    made = require_agent()
    yield made
    with lying_member(made, hello=_hello(made, 6, "honest")) as honest:
        assert not honest.asks(CALL, X)


def forward(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT


def sleep_until(path: str) -> None:
    wait_until(Path(path).exists)


LARGE_WEIGHT = torch.zeros(10, LIMITS.kept_bytes // 10 - 100, dtype=torch.uint8)


def zeros(count: int) -> list[torch.Tensor]:
    return [torch.zeros(count, dtype=torch.uint8)]


def rows_of_weight(row: int) -> dict[str, torch.Tensor]:
    return {"row": LARGE_WEIGHT[row]}


CALL = PythonCall(1, definition_of("forward"))
X = pack(((torch.ones(1, 3),), {}))
LARGE = pack(((torch.ones(100, 3),), {}))
_incarnations = iter(range(1 << 30, 1 << 40, 1 << 10))


def _hello(agent: Agent, worker_id: int, name: str, *, incarnation: int = 0, link: int = 1) -> Hello:
    given = incarnation or next(_incarnations)
    return Hello(worker_id, name, given, agent.member.incarnation, link, False, "", ticket=bytes(16))


def _in_context(number: int, own: int = OWN) -> RpcWithAutograd:
    return RpcWithAutograd(AutogradMetadata(own + number, own + 1), CALL, False)  # type: ignore[arg-type]


# --- under another name ---


def test_one_who_is_on_no_record_is_not_let_in(agent: Agent) -> None:
    """Else it would have as many limits as it gives itself names."""
    options, agent.options = agent.options, rpc.RpcBackendOptions()  # the helper does not put it on record then
    try:
        nobody = lying_member(agent, hello=_hello(agent, 9, "nobody"))
        with pytest.raises(AuthenticationError, match="not on record"), nobody:
            pass
    finally:
        agent.options = options


def test_the_end_of_another_cannot_be_told(agent: Agent) -> None:
    """Its incarnation stands in the store for all to read. Who had it could say goodbye for it."""
    incarnation = next(_incarnations)
    with lying_member(agent, hello=_hello(agent, 6, "honest", incarnation=incarnation)) as honest:
        assert not honest.asks(CALL, X)
        posing = lying_member(agent, hello=_hello(agent, 5, "liar", incarnation=incarnation))
        with pytest.raises(AuthenticationError, match="another's"), posing as liar:
            liar.send(Goodbye(incarnation, False), FrameKind.NOTICE)  # type: ignore[arg-type]
        assert not honest.asks(CALL, X)


def test_more_links_do_not_help(agent: Agent, folder: Path) -> None:
    incarnation, path = next(_incarnations), folder / "released"
    links = []
    try:
        for number in range(1, MOST_OF_ONE + 1):
            manager = lying_member(agent, hello=_hello(agent, 7, "many", incarnation=incarnation, link=number))
            links.append((manager, manager.__enter__()))
        one_more = lying_member(agent, hello=_hello(agent, 7, "many", incarnation=incarnation, link=999))
        with pytest.raises(AuthenticationError, match=f"{MOST_OF_ONE} links"), one_more:
            pass
        wait = pack(((str(path),), {})).payload
        for _, link in links[: LIMITS.running]:
            link.send(PythonCall(1, definition_of("sleep_until")), payload=wait)
        wait_until(lambda: sum(session.running for session in agent.peers.sessions()) >= LIMITS.running)
        assert "rule 'running'" in links[-1][1].asks(CALL, X)
    finally:
        path.touch()
        for manager, _ in links:
            manager.__exit__(None, None, None)
    wait_until(lambda: not any(session.running for session in agent.peers.sessions()))


def test_links_that_are_let_in_at_once_are_counted(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts from the moment it is found welcome, not from when it is served."""
    incarnation, numbers, peers = next(_incarnations), itertools.count(1), agent.peers

    def let_in() -> None:
        hello = _hello(agent, 8, "eager", incarnation=incarnation, link=next(numbers))
        with lying_member(agent, hello=hello):
            pass

    # As by threads that have told it, and do not come to serve it.
    monkeypatch.setattr(agent.connector._acceptor, "_admitted", lambda hello, welcome, connection: connection.close())
    try:
        for _ in range(MOST_OF_ONE):
            let_in()
        with pytest.raises(AuthenticationError, match=f"{MOST_OF_ONE} links"):
            let_in()
        peers.give_back_place(next(iter(peers._welcomed.values())))
        let_in()
    finally:
        monkeypatch.undo()
        for hello in list(peers._welcomed.values()):
            peers.give_back_place(hello)


def test_one_that_leaves_before_it_is_told_takes_no_place(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    acceptor, hello, taken = agent.connector._acceptor, _hello(agent, 10, "leaver"), []
    sock, admit = connect(address_of(agent, "unix"), PATIENCE), acceptor._admit

    def admit_and_leave(hello: Hello, caller: Any) -> Any:
        welcome = admit(hello, caller)
        sock.close()
        taken.append(hello in agent.peers._welcomed.values())
        return welcome

    agent.peers.learn([Member(hello.name, WorkerId(10), Incarnation(hello.incarnation), (), 0)])
    monkeypatch.setattr(acceptor, "_admit", admit_and_leave)
    handshake = DiallerHandshake(agent.connector.secret)
    sock.sendall(handshake.opening)
    sock.sendall(handshake.answer(receive_exactly(sock, handshake.opening_answer_bytes), hello))
    wait_until(lambda: taken and hello not in agent.peers._welcomed.values())
    assert taken == [True]


# --- what is kept ---


def test_a_reference_is_made_once(agent: Agent) -> None:
    """Each fork of it would be kept."""
    with lying_member(agent) as liar:
        made = PythonRemoteCall(OWN + 1, OWN + 2, 1, definition_of("forward"))  # type: ignore[arg-type]
        assert not liar.asks(made, X)
        again = PythonRemoteCall(OWN + 1, OWN + 3, 1, b"")  # type: ignore[arg-type]
        assert "exists already" in liar.asks(again, X)
        assert "exists already" in liar.asks(RRefCreationFailed(OWN + 1, OWN + 4))  # type: ignore[arg-type]
        assert not liar.asks(RRefCreationFailed(OWN + 1, OWN + 2))  # type: ignore[arg-type]


def test_bytes_of_references_are_counted(agent: Agent) -> None:
    """A function may return much for little; what several values share counts once."""
    own, most = 12 << 48, LIMITS.kept_bytes

    def made(number: int, function: str) -> PythonRemoteCall:
        code = ("zeros", "rows_of_weight").index(function) + 1
        return PythonRemoteCall(own + number, own + 100 + number, code, definition_of(function))  # type: ignore[arg-type]

    def let_go(*numbers: int) -> RRefUserDelete:
        return RRefUserDelete(tuple((own + number, own + 100 + number) for number in numbers))  # type: ignore[arg-type]

    values: dict[Any, Any] = rrefs_of(agent).values
    with lying_member(agent, hello=_hello(agent, 12, "keeper")) as keeper:

        def is_kept(number: int, function: str, argument: int) -> bool:
            assert not keeper.asks(made(number, function), pack(((argument,), {})))
            wait_until(lambda: values[own + number].done)  # the answer is a moment earlier
            return values[own + number].failure is None

        assert is_kept(1, "zeros", most - 100)
        assert not is_kept(2, "zeros", 101)
        assert "rule 'kept_bytes'" in keeper.asks(RRefFetch(own + 2))  # type: ignore[arg-type]
        assert is_kept(3, "zeros", 100)
        assert "rule 'kept_bytes'" in keeper.asks(made(4, "zeros"), pack(((1,), {})))
        assert not keeper.asks(let_go(1, 2, 3))
        assert all(is_kept(number, "rows_of_weight", number) for number in (5, 6, 7))
        assert not keeper.asks(let_go(5, 6, 7))


def test_calls_in_one_context_are_counted(agent: Agent) -> None:
    """What each brings is kept for a backward pass that need not come."""
    with lying_member(agent) as liar:
        said = [liar.asks(_in_context(100), X) for _ in range(LIMITS.context_calls + 1)]
        assert not any(said[:-1]) and "rule 'context_calls'" in said[-1]
        for number in range(101, 104):
            assert not liar.asks(_in_context(number), X)
        assert "rule 'contexts'" in liar.asks(_in_context(104), X)
    for number in range(100, 105):
        registry_of(agent).end(OWN + number)  # type: ignore[arg-type]


def test_who_asks_too_often_can_still_end_its_contexts(agent: Agent) -> None:
    """That is said once: refused, it would leave the context open for ever, and the party without one in the end."""
    look: Any = agent.layers.before_serving
    guard = next(cell.cell_contents for cell in look.__closure__ if isinstance(cell.cell_contents, Guard))
    with lying_member(agent, hello=_hello(agent, 13, "ender")) as liar:
        assert not liar.asks(_in_context(1, 13 << 48), X)
        rate = guard._peers["ender"].rate
        rate.rate, rate._tokens = 0.0, 0.0
        try:
            assert "rule 'calls_per_second'" in liar.asks(_in_context(2, 13 << 48), X)
            unknown = CleanupAutogradContext((13 << 48) + 2, ())  # type: ignore[arg-type]
            assert "rule 'calls_per_second'" in liar.asks(unknown)
            assert not liar.asks(CleanupAutogradContext((13 << 48) + 1, ()))  # type: ignore[arg-type]
        finally:
            rate.rate, rate._tokens = LIMITS.calls_per_second, LIMITS.calls_per_second
    assert registry_of(agent).get((13 << 48) + 1) is None  # type: ignore[arg-type]


def test_bytes_in_contexts_are_counted(agent: Agent) -> None:
    rows = torch.ones(LIMITS.kept_bytes // 3 // 12, 3)
    spec, data = TensorSpec(0, 0, tuple(rows.shape), (), 0, 0, 0), rows.numpy().tobytes()
    payload = pack(((rows,), {})).payload
    said = []
    with lying_member(agent) as liar:
        for number in range(4):
            liar.send(
                _in_context(200 + number),
                payload=payload,
                tensors=(spec,),
                segments=(SegmentSpec(len(data), INLINE, 0),),
                data_bytes=len(data),
            )
            liar.sock.sendall(data)
            _, answered, message = liar.answer()
            said.append(getattr(message, "text", ""))
            liar.send(PythonCall(0, b""), FrameKind.NOTICE, ack=answered + 1)  # it has arrived
    assert said[:3] == ["", "", ""] and "rule 'kept_bytes'" in said[3], said
    for number in range(200, 204):
        registry_of(agent).end(OWN + number)  # type: ignore[arg-type]


def test_a_tensor_that_is_repeated_without_end(agent: Agent) -> None:
    """Four bytes that the function would see as 4 TB."""
    spec = TensorSpec(0, 0, (2**20, 2**20), (0, 0), 0, 0, 0)
    with lying_member(agent) as liar:
        segments = (SegmentSpec(4, INLINE, 0),)
        liar.send(CALL, payload=X.payload, tensors=(spec,), segments=segments, data_bytes=4)
        liar.sock.sendall(bytes(4))
        assert "rule 'max_message_bytes'" in liar.answer()[2].text


def test_definitions_are_names(agent: Agent) -> None:
    before = memory_mb()
    with lying_member(agent) as liar:
        for number in range(1, 60):
            assert "rule 'exports only'" in liar.asks(PythonCall(number, bytes(1 << 20)))
    assert memory_mb() - before < 30


def test_results_that_are_never_acknowledged(agent: Agent) -> None:
    with lying_member(agent) as liar:
        said = [liar.asks(CALL, X) for _ in range(1100)]
    assert not any(said[:1000]) and "rule 'kept_bytes'" in said[-1]


# --- contexts and passes ---


def test_a_strict_context_does_not_bind_this_worker(agent: Agent) -> None:
    with lying_member(agent) as liar:
        call = RpcWithAutograd(AutogradMetadata(OWN + 300, OWN + 1), CALL, True)  # type: ignore[arg-type]
        assert not liar.asks(call, X)
        assert registry_of(agent).strict_context() is None
        begin = BeginPass(OWN + 300, OWN + 9, 77, False, ())  # type: ignore[arg-type]
        assert "root of the pass" in liar.asks(begin)  # each is remembered
    registry_of(agent).end(OWN + 300)  # type: ignore[arg-type]


def test_notices_sent_as_requests_are_answered(agent: Agent) -> None:
    """Else they would be under way for ever, and a shutdown would wait for them."""
    with lying_member(agent) as liar:
        assert not liar.asks(CancelCall(7))
        assert not liar.asks(AbortPass(OWN + 400, 1, "liar", "", "", 0))  # type: ignore[arg-type]
        assert not liar.asks(ParticipantDied(OWN + 400, "liar", 0))  # type: ignore[arg-type]


def test_every_message_has_its_rule(agent: Agent) -> None:
    """Whatever is made up is answered, and what no rule allows is refused by name: a new message, too."""
    frames = Frames(3, 1)
    for kind in typing.get_args(AnyMessage):
        if kind.__name__ != "Barrier":  # whoever reaches one waits there
            with lying_member(agent) as liar:
                said = liar.asks(frames._message(kind))
            assert said or kind.__name__ in _ANSWERED, kind
            assert kind.__name__ not in _REFUSED or "rule 'exports only'" in said, (kind, said)


_ANSWERED = {
    "AbortPass", "Ack", "CancelCall", "CleanupAutogradContext", "GivenUp", "ParticipantDied", "Ping", "RRefAck",
    "RRefChildAccept", "RRefCreationFailed", "RRefFlush", "RRefFlushed", "RRefUserDelete", "TooLateForPass",
}  # fmt: skip
_REFUSED = {
    "Observe", "DebugWaits", "RpcWithProfiling", "RpcWithTrace", "WithGraph", "RRefForkRequest", "PassDoneWithInputs",
    "Observed", "Goodbye", "Exhausted",
}  # fmt: skip


# --- what is written down ---


def test_what_is_refused_does_not_fill_the_disk(agent: Agent, folder: Path) -> None:
    guard: Any = agent.layers.before_serving
    peers = next(cell.cell_contents for cell in guard.__closure__ if hasattr(cell.cell_contents, "_peers"))._peers
    audit = folder / "audit"
    with lying_member(agent) as liar:
        assert not liar.asks(CALL, X)
        rate, recorded = peers["liar"].rate, peers["liar"].recorded
        rate.rate, rate._tokens = 0.0, 0.0  # no more calls, however slow these are
        recorded._clock, recorded._since = lambda: 0.0, 0.0
        before = len(audit.read_text().splitlines())
        for _ in range(500):
            assert "rule 'calls_per_second'" in liar.asks(CALL, X)
        recorded._clock = lambda: 5.0  # five seconds later, there are five records more
        for _ in range(500):
            assert "rule 'calls_per_second'" in liar.asks(CALL, X)
        lines = [json.loads(line) for line in audit.read_text().splitlines()[before:]]
        rate.rate, recorded._clock, recorded._since = LIMITS.calls_per_second, time.monotonic, time.monotonic()
    assert len(lines) == 15
    assert all(line["what"] == "refusal" for line in lines)


def test_a_table_that_says_nothing_true_does_not_fill_the_disk(agent: Agent, folder: Path) -> None:
    """A call is recorded before it is refused: with a million sizes of one tensor, or so many tensors of no size."""
    tables = [(TensorSpec(0, 0, (1,) * 500_000, (), 0, 0, 0),), (TensorSpec(0, 0, (), (), 0, 0, 0),) * 50_000]
    with lying_member(agent) as liar:
        for table in tables:
            before = (folder / "audit").stat().st_size
            number = liar.send(CALL, payload=X.payload, tensors=table)
            assert liar.answer()[:2] == (FrameKind.FAILURE, number)
            assert (folder / "audit").stat().st_size - before < 2 << 20
    last = json.loads((folder / "audit").read_text().splitlines()[-2])
    assert len(last["tensors"]) + last["more_tensors"] == 50_000


def test_messages_that_never_end(agent: Agent) -> None:
    """Each connection of a party kept the memory of a message that had begun."""
    most = agent.options.max_message_bytes
    header = encode_prefix(FrameKind.REQUEST, 1, 0, CALL, (), (), 0, most // 2 - 1000)
    incarnation = next(_incarnations)
    hellos = [_hello(agent, 30, "another", incarnation=next(_incarnations))]
    hellos += [_hello(agent, 31, "begins", incarnation=incarnation, link=link) for link in (1, 2, 3)]
    with contextlib.ExitStack() as stack:
        *members, one_too_many = [stack.enter_context(lying_member(agent, hello=hello)) for hello in hellos]
        for number, member in enumerate(members, 1):  # each party has room for two of this size
            member.sock.sendall(header)
            wait_until(lambda many=number: _reserved(agent) > many * (most // 2 - 2000))
        one_too_many.sock.sendall(header)
        assert one_too_many.sock.recv(1) == b""


def _reserved(agent: Agent) -> int:
    return sum(session.connection.reserved for session in agent.peers.sessions() if session.connection is not None)


def test_notices_that_fail_do_not_fill_the_log(agent: Agent) -> None:
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log = logging.getLogger("telegrad.rpc")
    log.addHandler(handler)
    try:
        with lying_member(agent) as liar:
            for _ in range(500):
                liar.send(PythonCall(0, b""), FrameKind.NOTICE, payload=EMPTY_CALL.payload)
            assert not liar.asks(CALL, X)
    finally:
        log.removeHandler(handler)
    assert len(seen) <= 25
