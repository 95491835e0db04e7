"""Parties that do not trust each other: exported functions alone, no pickle, bounds for each peer, a record of all."""

import dataclasses
import json
import os
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad import autograd, rpc
from telegrad.errors import CallRefused, ProtocolError, RemoteError, RpcTimeout, SerializationError, TelegradError
from telegrad.rpc.current import require_agent
from telegrad.rpc.trust.exports import definition_of
from telegrad.rpc.trust.rate import TokenBucket
from telegrad.wire import plain
from telegrad.wire.codec import EMPTY_CALL, pack, pack_plain, unpack
from telegrad.wire.frames import FrameKind
from telegrad.wire.messages import (
    AutogradMetadata,
    BeginPass,
    DebugWaits,
    PropagateGradients,
    PythonCall,
    PythonRemoteCall,
    RRefBackward,
    RRefFetch,
    RRefForkRequest,
)
from tests.attacks.strangers import PATIENCE, lying_member
from tests.cluster import end, join, process
from tests.waiting import wait_until


@rpc.register_dataclass
@dataclasses.dataclass
class Batch:
    """What travels between the two."""

    number: int
    rows: torch.Tensor
    note: str | None = None
    parts: list[int] = dataclasses.field(default_factory=list)


WEIGHT = torch.ones(3, 3, requires_grad=True)


def forward(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT


def own_gradient() -> torch.Tensor:
    """The gradient of the weight in the context of the call; it is this party's own, so it may say."""
    context = autograd.current_context()
    assert context is not None
    return autograd.get_gradients(context.context_id)[WEIGHT]


def double(batch: Batch) -> Batch:
    return dataclasses.replace(batch, rows=batch.rows * 2, number=batch.number + 1)


def fail() -> None:
    raise ValueError("label 7 of patient 12 is wrong")


def leak() -> object:
    return object()


def wait_for(path: str) -> None:
    wait_until(Path(path).exists)


OPTIONS: dict[str, Any] = {"exports_only": True, "secret": "of both parties, which is long"}


def company(meeting: str, audit: str) -> None:
    """The other party."""
    for function in (forward, double, fail, leak, wait_for):
        rpc.export(function)
    rpc.export(os.getpid, name="pid", may_call=["somebody else"])
    limits = rpc.Limits(running=20, references=5, contexts=4, calls_per_second=1e6)
    join("company", 1, 3, meeting, {**OPTIONS, "audit": audit, "limits": limits})
    rpc.shutdown()


def workshop(meeting: str) -> None:
    """One more, that has not much time."""
    rpc.export(forward)
    join("workshop", 2, 3, meeting, {**OPTIONS, "limits": rpc.Limits(calls_per_second=20)})
    rpc.shutdown()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three parties, one of them this process; the audit of the second."""
    folder = tmp_path_factory.mktemp("exports")
    audit, meeting = folder / "audit", f"file://{folder}/meeting"
    others = [process(company, meeting, str(audit)), process(workshop, meeting)]
    join("hospital", 0, 3, meeting, OPTIONS)
    try:
        yield audit
        begun = time.monotonic()
        rpc.shutdown(timeout=100)
        assert time.monotonic() - begun < 60, "it waited for references that were refused"
    finally:
        end(others, patience=30)


def test_what_travels(records: Path) -> None:
    x = torch.randn(2, 3)
    assert torch.equal(rpc.rpc_sync("company", "forward", (x,)), x @ torch.ones(3, 3))
    got = rpc.rpc_sync("company", "double", kwargs={"batch": Batch(3, x, parts=[1, 2])})
    assert type(got) is Batch and got.number == 4 and torch.equal(got.rows, 2 * x) and got.parts == [1, 2]


def test_gradients_pass(records: Path) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("company", "forward", (x,))
        autograd.backward(context_id, [y.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2, 3), 3.0))


def test_references_to_results(records: Path) -> None:
    rref = rpc.remote("company", "forward", (torch.ones(1, 3),))
    assert torch.equal(rref.to_here(), torch.full((1, 3), 3.0))


@pytest.mark.parametrize(
    ("function", "rule"), [("pid", "may_call"), ("nothing", "no function is exported"), ("os.getpid", "exports only")]
)
def test_a_refusal_names_the_rule(records: Path, function: str, rule: str) -> None:
    with pytest.raises(CallRefused, match=rule):
        rpc.rpc_sync("company", function)


def test_a_function_is_not_sent(records: Path) -> None:
    with pytest.raises(SerializationError, match="exports_only"):
        rpc.rpc_sync("company", os.getpid)


def test_a_value_that_is_not_plain_is_not_sent(records: Path) -> None:
    with pytest.raises(SerializationError, match="not plain data"):
        rpc.rpc_sync("company", "forward", (object(),))
    with pytest.raises((RemoteError, SerializationError), match="not plain data"):
        rpc.rpc_sync("company", "leak")


def test_an_error_says_nothing_about_the_data(records: Path) -> None:
    with pytest.raises(RemoteError, match=r"ValueError.*incident") as caught:
        rpc.rpc_sync("company", "fail")
    assert "patient" not in str(caught.value) and "File" not in "".join(getattr(caught.value, "__notes__", []))


def test_too_many_references(records: Path) -> None:
    kept = []
    for _ in range(20):
        kept.append(rpc.remote("company", "forward", (torch.ones(1, 3),)))
    with pytest.raises(CallRefused, match="references"):
        kept[-1]._get_future().wait()
    kept.clear()
    wait_until(lambda: _calls_again("company"))


def _calls_again(name: str) -> bool:
    try:
        rpc.remote(name, "forward", (torch.ones(1, 3),)).to_here()
    except TelegradError:
        time.sleep(0.1)  # not so often that it is refused for that
        return False
    return True


def test_too_many_at_a_time(records: Path, tmp_path: Path) -> None:
    release = tmp_path / "release"
    futures = [rpc.rpc_async("company", "wait_for", (str(release),)) for _ in range(60)]
    wait_until(lambda: sum(future.done() for future in futures) >= 30)  # these cannot have run
    release.touch()
    refused = 0
    for future in futures:
        try:
            future.wait()
        except CallRefused as error:
            refused += "'running'" in str(error)
    assert 30 <= refused < 60


def _call_often(times: int) -> None:
    x = torch.ones(1, 3)
    for _ in range(times):  # some at a time, so that even a busy machine is fast enough
        torch.futures.wait_all([rpc.rpc_async("workshop", "forward", (x,)) for _ in range(15)])


def test_too_many_in_a_second(records: Path) -> None:
    with torch.no_grad(), pytest.raises(CallRefused, match="calls_per_second"):
        _call_often(300)
    wait_until(lambda: _calls_again("workshop"))


def test_so_many_in_a_second_and_no_more() -> None:
    now = [100.0]
    bucket = TokenBucket(10.0, 20.0, clock=lambda: now[0])
    assert [bucket.take() for _ in range(21)] == [True] * 20 + [False]
    now[0] += 0.5
    assert [bucket.take() for _ in range(6)] == [True] * 5 + [False]
    now[0] += 3600.0
    assert sum(bucket.take() for _ in range(100)) == 20


def test_the_audit(records: Path) -> None:
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert records.stat().st_mode & 0o077 == 0
    assert {line["what"] for line in lines} >= {"call", "result", "refusal", "error", "gradients"}
    calls = [line for line in lines if line["what"] == "call" and line.get("function") == "forward"]
    assert calls[0]["peer"] == "hospital" and calls[0]["direction"] == "in"
    assert calls[0]["tensors"] == [{"dtype": "float32", "shape": [2, 3], "bytes": 24}]
    assert any("may_call" in line["rule"] for line in lines if line["what"] == "refusal")
    assert "patient" not in records.read_text()


# --- a party that does not keep to it ---


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import pathlib, os; pathlib.Path(os.environ['BOMB']).touch()",)


def _bombs() -> list[tuple[Any, bytes]]:
    bomb = b"\x05" + pickle.dumps(_Bomb())
    named = definition_of("forward")
    return [
        (PythonCall(0, b""), b"\x05" + pickle.dumps((_Bomb(), (), {}))),
        (PythonCall(0, b""), bomb),
        (PythonCall(1, bomb), EMPTY_CALL.payload),
        (PythonCall(2, pack(os.getpid).payload), EMPTY_CALL.payload),
        (PythonCall(3, named), bomb),
        (PythonRemoteCall((5 << 48) + 1, (5 << 48) + 2, 3, named), bomb),
        (PythonRemoteCall((5 << 48) + 1, (5 << 48) + 2, 0, bomb), bomb),
        (RRefFetch((1 << 48) + 1), b""),  # of another worker
        (RRefForkRequest(1, 2, 3), b""),
        (RRefBackward((5 << 48) + 1, 7, False), b""),
        (BeginPass(7, 1, 5, False, ()), b""),
        (PropagateGradients(AutogradMetadata(7, 8), 1, 5, False, (), ()), b""),
        (DebugWaits(), b""),
    ]


def test_nothing_pickled_is_read(tmp_path: Path) -> None:
    """In one test, since the two parties above are a job of this process too."""
    other = process(_attack_alone, str(tmp_path))
    other.join(PATIENCE)
    assert other.exitcode == 0


def _attack_alone(folder: str) -> None:
    bomb, report = Path(folder, "exploded"), Path(folder, "audit")
    os.environ["BOMB"] = str(bomb)
    rpc.export(forward)
    join("alone", 0, 1, f"file://{folder}/meeting", {**OPTIONS, "audit": str(report)})
    agent = require_agent()
    try:
        assert not agent.options.shared_memory
        for message, payload in _bombs():
            with lying_member(agent) as liar:
                liar.send(message, payload=payload)
                kind, _ = liar.read()
                if type(message) is PythonRemoteCall and message.function == 3:
                    assert kind == FrameKind.REPLY  # the reference is made, and holds the refusal
                else:
                    assert kind == FrameKind.FAILURE, message
                assert not bomb.exists(), message
        with lying_member(agent, shared_memory=True) as liar:  # (6) blocks are not shared here: the lane is closed
            assert liar.lane is not None
            liar.lane.settimeout(PATIENCE)
            assert liar.lane.recv(1) == b""
        assert "forward" not in [line for line in report.read_text().splitlines() if "refusal" in line]
    finally:
        rpc.shutdown(graceful=False)


def test_a_call_that_nobody_waits_for_can_be_stopped(records: Path, tmp_path: Path) -> None:
    """That a call timed out is told, and is no offence."""
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("company", "wait_for", (str(tmp_path / "never"),), timeout=0.2)
    (tmp_path / "never").touch()
    rpc.rpc_sync("company", "double", kwargs={"batch": Batch(3, torch.ones(1))})
    assert "CancelCall" not in records.read_text()


def test_contexts_cannot_be_guessed(records: Path) -> None:
    numbers = set()
    for _ in range(3):
        with autograd.context() as context_id:
            numbers.add(context_id)
    assert max(numbers) - min(numbers) > 1000


def test_a_sender_cannot_change_what_it_sent(records: Path) -> None:
    """(6) It keeps its mapping of a shared block, so none is shared here."""
    agent = require_agent()
    link = agent.link(agent.find("company"))
    assert link.connection().stream.lane is None


# --- plain data ---

_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_hashable = st.booleans() | st.integers() | st.text()
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(_hashable, inner, max_size=4)
        | st.sets(_hashable, max_size=4)
    ),
    max_leaves=12,
)


@given(_values)
def test_plain_data_arrives_as_it_left(value: Any) -> None:
    packed = pack_plain(value)
    assert packed.payload[0] not in (5, 6)
    got = unpack(packed.payload, packed.tensors)
    assert got == value and type(got) is type(value)


@given(st.binary(max_size=200), st.integers(0, 2))
def test_any_bytes_are_plain_data_or_refused(raw: bytes, tensors: int) -> None:
    try:
        plain.decode(raw, [torch.zeros(1)] * tensors)
    except ProtocolError:
        pass


@given(st.randoms(use_true_random=False))
def test_mutated_plain_data(source: random.Random) -> None:
    raw = bytearray(plain.encode([Batch(1, torch.zeros(2)), {"a": (1, 2.5, None)}, 2**80, 3j])[0])
    for _ in range(source.randint(1, 4)):
        raw[source.randrange(len(raw))] = source.randrange(256)
    try:
        plain.decode(bytes(raw), [torch.zeros(2)])
    except ProtocolError:
        pass


def test_the_fields_of_a_dataclass_are_checked() -> None:
    raw, tensors = plain.encode(Batch(1, torch.zeros(2)))
    assert plain.decode(raw, tensors).number == 1
    forged, _ = plain.encode(Batch("no number", torch.zeros(2)))
    with pytest.raises(ProtocolError, match="number"):
        plain.decode(forged, tensors)
    forged, _ = plain.encode(Batch(1, "no tensor"))
    with pytest.raises(ProtocolError, match="rows"):
        plain.decode(forged, tensors)


def test_what_is_not_plain() -> None:
    for value in (object(), lambda: 1, Path("x"), [torch.nn.Linear(1, 1)]):
        with pytest.raises(SerializationError, match="not plain data"):
            pack_plain(value)


def test_exports_are_named_once() -> None:
    rpc.export(forward, name="mine")
    with pytest.raises(ValueError, match="another function"):
        rpc.export(fail, name="mine")
    with pytest.raises(TypeError, match="list of names"):
        rpc.export(fail, may_call="company")
    rpc.withdraw("mine")
