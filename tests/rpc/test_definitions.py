"""A function is sent once and is a number afterwards, which holds whatever becomes of the call it came with."""

import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from telegrad.errors import CallRefused, ProtocolError, SerializationError
from telegrad.ids import ContextId, ForkId, Incarnation, MessageId, RRefId, WorkerId
from telegrad.rpc.request import Request
from telegrad.rpc.server.function_table import FunctionTable
from telegrad.rpc.server.session import Session
from telegrad.rpc.workers import Member
from telegrad.wire.codec import pack
from telegrad.wire.definitions import ANEW, NEWS, OF_A_SCRIPT, OF_A_SCRIPT_IN_PART
from telegrad.wire.frames import Frame, FrameKind
from telegrad.wire.messages import (
    AnyMessage,
    AutogradMetadata,
    PythonCall,
    PythonRemoteCall,
    RpcWithAutograd,
)
from tests.rpc.quiet import Events, QuietCopier, QuietStream, quiet_runtime, serve_with

CALLER = Member("caller", WorkerId(0), Incarnation(1), (), 0)
ADD = pack(operator.add).payload
METADATA = AutogradMetadata(ContextId(1), MessageId(2))

# The first call of a function, in each of the ways it can come.
FIRST: dict[str, AnyMessage] = {
    "call": PythonCall(7, ADD),
    "remote": PythonRemoteCall(RRefId(1), ForkId(2), 7, ADD),
    "call in a context": RpcWithAutograd(METADATA, PythonCall(7, ADD), False),
    "remote in a context": RpcWithAutograd(METADATA, PythonRemoteCall(RRefId(1), ForkId(2), 7, ADD), False),
}
NEXT = PythonCall(7, b"")


learned: list[str] = []


def learn(word: str, function: Any) -> Any:
    learned.append(word)
    return function


class Learning:
    """What says so when it is unpacked, and is a function then."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return learn, self.arguments


class Failing:
    def __reduce__(self) -> tuple[Any, ...]:
        return operator.truediv, (1, 0)


class Quiet:
    """A connection over which these messages have come, and nothing more will."""

    def __init__(self, *messages: AnyMessage) -> None:
        self._frames = [Frame(FrameKind.REQUEST, i + 1, 0, m) for i, m in enumerate(messages)]
        self.stream = QuietStream(0, lambda: bool(self._frames))
        self.copier = QuietCopier()

    def receive(self) -> list[Frame]:
        frames, self._frames = self._frames, []
        return frames


def serving(serve: Callable[[Request], None], *messages: AnyMessage) -> tuple[Session, deque[Callable[[], None]]]:
    """A session to which these messages have come, and what it has submitted to the I/O threads."""
    runtime, quiet = quiet_runtime()
    serve_with(quiet, serve, PythonCall, PythonRemoteCall, RpcWithAutograd)
    session = Session(runtime, Events(), CALLER, False)
    session.attach(Quiet(*messages))
    return session, quiet.io_threads.tasks


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_a_call_that_is_refused_has_defined_its_function(first: AnyMessage) -> None:
    """As it is when its context has ended: nobody looks at the function then."""
    found = []

    def serve(request: Request) -> None:
        if request.message is NEXT:
            found.append(request.session.functions.resolve(7))

    session, _ = serving(serve, first, NEXT)
    session.ready()
    assert found == [operator.add]


def test_the_next_call_may_run_before_the_first() -> None:
    """The thread that took the first was held up, and another serves meanwhile."""
    found = []

    def serve(request: Request) -> None:
        if request.message is not NEXT:
            session.relieve()
            session.relieve()  # the same request at two looks: it is stuck
            tasks.popleft()()
        found.append((request.frame.request_id, request.session.functions.resolve(7)))

    session, tasks = serving(serve, FIRST["call"], NEXT)
    session.ready()
    assert found == [(2, operator.add), (1, operator.add)]


def test_what_a_script_has_changed_is_known_to_all_calls_after_it() -> None:
    """Also if the call that it came with is refused, and whichever function is called next."""
    learned.clear()
    table = FunctionTable("caller")
    table.note(PythonCall(7, OF_A_SCRIPT + pack(Learning("defined", operator.add)).payload))
    table.note(PythonCall(8, pack(operator.sub).payload))
    assert learned == []
    assert table.resolve(8) is operator.sub
    assert learned == ["defined"]
    assert table.resolve(7) is operator.add
    assert set(table.found) == {7, 8}
    for word in ("first", "second"):
        table.note(PythonCall(7, NEWS + pack(Learning(word, None)).payload))
        assert not table.found  # so that each call looks here
    table.note(PythonCall(7, OF_A_SCRIPT + pack(Learning("defined", operator.add)).payload))  # sent again
    assert table.resolve(8) is operator.sub
    assert learned == ["defined", "first", "second"]


def test_what_cannot_be_unpacked_is_an_error_of_all_that_may_use_it() -> None:
    """Until all comes that a function uses: what came with it is lost as well, and nobody knows what that was."""
    table = FunctionTable("caller")
    for number, function in ((7, operator.add), (8, operator.sub)):
        table.note(PythonCall(number, OF_A_SCRIPT + pack(function).payload))
    table.note(PythonCall(9, pack(operator.mul).payload))
    assert table.resolve(8) is operator.sub
    table.note(PythonCall(7, NEWS + pack(Failing()).payload))
    table.note(PythonCall(7, NEWS + pack("what else has changed").payload))
    table.note(PythonCall(10, OF_A_SCRIPT_IN_PART + pack(operator.neg).payload))
    table.note(PythonCall(11, OF_A_SCRIPT + pack(operator.pos).payload))
    for number in (7, 8, 10) * 2:
        with pytest.raises(SerializationError, match="ZeroDivisionError") as caught:
            table.resolve(number)
        assert caught.value.of_script
    assert table.resolve(9) is operator.mul
    assert table.resolve(11) is operator.pos
    for number, function in ((7, operator.add), (8, operator.sub), (10, operator.neg)):
        table.note(PythonCall(number, ANEW + pack(function).payload))
        assert table.resolve(number) is function


def test_what_changes_is_kept_only_until_it_is_unpacked() -> None:
    table = FunctionTable("caller")
    table.note(PythonCall(7, OF_A_SCRIPT + ADD))
    news = PythonCall(7, NEWS + pack("x" * 2**20).payload)
    for _ in range(200):
        table.note(news)
        table.resolve(7)
    for _ in range(127):
        table.note(news)
    with pytest.raises(ProtocolError, match="wait for a call"):
        table.note(news)


def test_a_worker_that_runs_exported_functions_alone_unpacks_nothing() -> None:
    learned.clear()
    table = FunctionTable("caller", exports_only=True)
    for form in (OF_A_SCRIPT, OF_A_SCRIPT_IN_PART, NEWS, ANEW):
        table.note(PythonCall(7, form + pack(Learning("defined", None)).payload))
        with pytest.raises(CallRefused):
            table.resolve(7)
    assert learned == []


def test_a_number_that_was_never_defined() -> None:
    session, _ = serving(lambda _: None)
    with pytest.raises(ProtocolError, match="never defined"):
        session.functions.resolve(7)
