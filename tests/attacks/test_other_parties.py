"""Several parties at one worker: none speaks about the contexts of another, or keeps more there than it may."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.autograd.registry import registry_of
from telegrad.errors import TooManyCalls
from telegrad.rpc.current import require_agent
from telegrad.rpc.trust.exports import definition_of
from telegrad.rpc.trust.guard import ReferenceHolder
from telegrad.transport.handshake import Hello
from telegrad.wire.codec import pack
from telegrad.wire.frames import FrameKind
from telegrad.wire.messages import (
    AbortPass,
    AutogradMetadata,
    BeginPass,
    CleanupAutogradContext,
    DebugWaits,
    Observe,
    ParticipantDied,
    PropagateGradients,
    PythonCall,
    PythonRemoteCall,
    RpcWithAutograd,
    RpcWithProfiling,
    RpcWithTrace,
    RRefBackward,
    RRefCreationFailed,
    RRefFlush,
    RRefFlushed,
    RRefUserDelete,
    TooLateForPass,
    WithGraph,
)
from tests.attacks.strangers import PATIENCE, lying_member
from tests.cluster import end, join, process
from tests.waiting import wait_until

WEIGHT = torch.ones(3, 3, requires_grad=True)
OPTIONS: dict[str, Any] = {"exports_only": True, "secret": "of both parties, which is long"}


def forward(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT


# One party opens a context at the worker, and another, with a connection of its own, speaks about it.

OWN, OTHERS = 5 << 48, 6 << 48


def _about(context_id: int) -> list[Any]:
    metadata = AutogradMetadata(context_id, 1)  # type: ignore[arg-type]
    begin = BeginPass(context_id, 1, 5, False, ())  # type: ignore[arg-type]
    gradients = PropagateGradients(metadata, 1, 5, False, (), ())  # type: ignore[arg-type]
    return [
        begin,
        gradients,
        WithGraph(begin, True, False, (), -1),  # type: ignore[arg-type]
        WithGraph(gradients, True, False, (), -1),  # type: ignore[arg-type]
        RRefBackward(OWN + 1, context_id, False),  # type: ignore[arg-type]
        AbortPass(context_id, 1, "liar", "no reason", "alone", 1),  # type: ignore[arg-type]
        CleanupAutogradContext(context_id, ()),  # type: ignore[arg-type]
        ParticipantDied(context_id, "alone", 1),  # type: ignore[arg-type]
        TooLateForPass(metadata, 1),  # type: ignore[arg-type]
        Observe("status", b""),
        RpcWithTrace("", (), PythonCall(0, b"")),
        RpcWithProfiling("key", 0, PythonCall(0, b"")),
        DebugWaits(),
    ]


def test_contexts_of_others_are_left_alone(tmp_path: Path) -> None:
    other = process(_disturb, str(tmp_path))
    other.join(PATIENCE)
    assert other.exitcode == 0


def _disturb(folder: str) -> None:
    rpc.export(forward)
    limits = rpc.Limits(references=5)
    join("alone", 0, 1, f"file://{folder}/meeting", {**OPTIONS, "limits": limits, "audit": f"{folder}/audit"})
    agent = require_agent()
    registry = registry_of(agent)
    try:
        context_id = OTHERS + 7
        call = RpcWithAutograd(AutogradMetadata(context_id, OTHERS + 1), PythonCall(1, definition_of("forward")), False)  # type: ignore[arg-type]
        x = pack(((torch.ones(1, 3),), {}))
        hello = Hello(6, "honest", 77, agent.member.incarnation, 1, False, "main", ticket=bytes(16))
        with lying_member(agent, hello=hello) as honest:
            honest.send_packed(call, x)
            assert honest.read()[0] == FrameKind.REPLY
            assert registry.get(context_id) is not None
            with lying_member(agent) as liar:
                for message in _about(context_id):
                    liar.send(message)
                    assert liar.read()[0] == FrameKind.FAILURE, message
                    context = registry.get(context_id)
                    assert context is not None and context.failure is None and not context.ended, message
            honest.send(CleanupAutogradContext(context_id, ()))  # type: ignore[arg-type]
            assert honest.read()[0] == FrameKind.REPLY
            assert registry.get(context_id) is None
        _keep_too_much(agent)
    finally:
        rpc.shutdown(graceful=False)
    refused = [json.loads(line) for line in Path(folder, "audit").read_text().splitlines() if '"refusal"' in line]
    assert sum("own contexts" in line["rule"] for line in refused) >= 7


def _keep_too_much(agent: Any) -> None:
    """References that are said to be gone and are not, or come in another way than by a call."""
    kept = agent.layers.find(ReferenceHolder)
    x = pack(((torch.ones(1, 3),), {}))
    with lying_member(agent) as liar:
        for number in range(1, 20):
            rref_id = OWN + number
            call = PythonRemoteCall(rref_id, OWN + 1000 + number, 1, definition_of("forward"))  # type: ignore[arg-type]
            liar.send_packed(call, x)
            liar.read()
            liar.send(RRefUserDelete(((rref_id, OWN + 5000),)))  # type: ignore[arg-type] # a fork that never was
            liar.read()
            liar.send(RRefCreationFailed(OWN + 100 + number, OWN + 2000 + number))  # type: ignore[arg-type]
            liar.read()
            liar.send(RRefFlushed(1, ((OWN + 200 + number, OWN + 3000 + number),)))  # type: ignore[arg-type]
            assert liar.read()[0] == FrameKind.FAILURE
            liar.send(RRefFlush(9 << 10))  # type: ignore[arg-type] # nobody
            assert liar.read()[0] == FrameKind.FAILURE
        assert sum(kept.keeps(OWN + number) for number in range(5000)) <= 5


# --- and those who have a part are not refused ---


def pass_on(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("third", "forward", (x * 2,))
    return result


def open_contexts() -> int:
    return len(registry_of(require_agent()))


def _serve(name: str, rank: int, meeting: str) -> None:
    for function in (forward, pass_on, open_contexts):
        rpc.export(function)
    join(name, rank, 3, meeting, OPTIONS)
    rpc.shutdown()


def test_a_pass_over_three_parties(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    others = [process(_serve, name, rank, meeting) for rank, name in ((1, "second"), (2, "third"))]
    try:
        join("first", 0, 3, meeting, OPTIONS)
        x = torch.ones(1, 3, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("third", "forward", (rpc.rpc_sync("second", "pass_on", (x,)),))
            autograd.backward(context_id, [y.sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((1, 3), 18.0))
        wait_until(lambda: not any(rpc.rpc_sync(name, "open_contexts") for name in ("second", "third")))
        rpc.shutdown(timeout=PATIENCE)
    finally:
        end(others, patience=30)


def busy_shop(meeting: str) -> None:
    """A party that answers few calls a second, and that others meet at as they leave."""
    rpc.export(forward)
    join("shop", 0, 2, meeting, {**OPTIONS, "limits": rpc.Limits(calls_per_second=20)})
    rpc.shutdown()


def ask_often() -> None:
    for _ in range(10_000):
        rpc.rpc_sync("shop", "forward", (torch.ones(1, 3),))


def test_who_has_asked_too_often_leaves_with_the_others(tmp_path: Path) -> None:
    """What Telegrad itself has to say is said again."""
    meeting = f"file://{tmp_path}/meeting"
    shop = process(busy_shop, meeting)
    try:
        join("guest", 1, 2, meeting, OPTIONS)
        with pytest.raises(TooManyCalls):
            ask_often()
        rpc.shutdown(timeout=90)
    finally:
        end([shop], patience=30)
