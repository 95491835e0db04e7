"""Whole agents in one process over a memory transport: calls both ways, nested, failing, cut off, resumed, leaving."""

import operator
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from telegrad.cuda import order
from telegrad.errors import AuthenticationError, RpcTimeout, SerializationError, WorkerDied
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.reply_reader import BURST_CALLS
from telegrad.rpc.round_trip import start_call, wait_for_value
from telegrad.rpc.threads.yield_turn import local
from telegrad.transport.faulty import Fault, FaultPlan, Faults
from telegrad.transport.memory import MemoryListener, dial_memory
from telegrad.wire.messages import Ping
from tests.rpc.agents import agents, call, introduce, office, start_agent
from tests.waiting import wait_until

ran: Counter[str] = Counter()
gate = threading.Event()
entered = threading.Event()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    ran.clear()
    gate.clear()
    entered.clear()
    yield
    gate.set()


@pytest.fixture(params=[True, False], ids=["shared", "socket"])
def two(request: pytest.FixtureRequest) -> Iterator[dict[str, Agent]]:
    with office("a", "b", shared_memory=request.param) as made:
        yield made


@pytest.fixture
def three() -> Iterator[dict[str, Agent]]:
    with office("a", "b", "c") as made:
        yield made


# --- what runs on the agents ---


def count(what: str) -> int:
    ran[what] += 1
    return ran[what]


def wait_at_gate(what: str) -> str:
    ran[what] += 1
    entered.set()
    assert gate.wait(120)
    return what


def back_and_forth(here: str, there: str, levels: int) -> int:
    return 0 if levels == 0 else 1 + call(here, there, back_and_forth, there, here, levels - 1)


def along(path: list[str]) -> list[str]:
    here, *rest = path
    return [here, *(call(here, rest[0], along, rest) if rest else [])]


def fail(text: str) -> None:
    raise LookupError(text)


def echo(value: Any) -> Any:
    return value


# --- calls ---


def test_calls_both_ways(two: dict[str, Agent]) -> None:
    assert call("a", "b", operator.add, 1, 2) == 3
    assert call("b", "a", operator.mul, 3, 4) == 12
    assert call("a", "a", operator.sub, 3, 4) == -1


@pytest.mark.parametrize("size", [0, 3, 10_000, 300_000])
def test_tensors_belong_to_their_receiver(two: dict[str, Agent], size: int) -> None:
    x = torch.arange(float(size))
    y = call("a", "b", echo, x)
    assert torch.equal(x, y)
    y.fill_(-1)
    assert torch.equal(x, torch.arange(float(size)))


def test_a_call_that_travels_on(three: dict[str, Agent]) -> None:
    path = ["b", "c", "a", "b", "a", "c"]
    assert call("a", "b", along, path) == path


def test_mutual_recursion(two: dict[str, Agent]) -> None:
    assert call("a", "b", back_and_forth, "b", "a", 60) == 60


def test_many_at_once_from_all_sides(three: dict[str, Agent]) -> None:
    jobs = [(caller, to, i) for i in range(40) for caller in three for to in three]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda job: call(job[0], job[1], operator.add, job[2], 1), jobs))
    assert results == [i + 1 for _, _, i in jobs]


def test_errors_say_where(three: dict[str, Agent]) -> None:
    with pytest.raises(LookupError, match=r"(?s)asked for.*worker 'b'.*in call.*worker 'c'.*in fail"):
        call("a", "b", call, "b", "c", fail, "asked for")


def test_a_late_reply_is_dropped(two: dict[str, Agent]) -> None:
    call("a", "b", count, "before")  # so that there is a connection
    with pytest.raises(RpcTimeout, match="wait_at_gate"):
        call("a", "b", wait_at_gate, "slow", timeout=0.2)
    gate.set()
    assert call("a", "b", count, "after") == 1
    wait_until(lambda: not agents["b"].under_way())


def test_each_agent_is_sent_no_more_than_it_takes_in() -> None:
    """Over a socket; in shared memory tensors do not count."""
    with office("a", "b", shared_memory=False, max_message_bytes=10_000_000):
        agents["c"] = start_agent("c", 2, shared_memory=False, max_message_bytes=100_000)
        introduce()
        too_much = bytes(200_000)
        for _ in range(2):
            with pytest.raises(SerializationError, match=r"of 2\d+ bytes.*100000 that worker 'c'.*max_message_bytes"):
                call("a", "c", len, too_much)
        with pytest.raises(SerializationError, match="100000 that worker 'c'"):  # told by b, which could not answer
            call("c", "b", bytes, 200_000)
        with pytest.raises(SerializationError, match="100000 that worker 'c'"):
            call("b", "c", echo, torch.zeros(200_000))
        assert call("a", "c", bytes, 200_000) == too_much
        assert call("c", "b", len, too_much) == 200_000
        assert call("a", "b", echo, too_much) == too_much


@pytest.mark.parametrize("make", [bytes, torch.zeros])
def test_a_large_reply_is_forgotten_as_soon_as_it_has_arrived(two: dict[str, Agent], make: Any) -> None:
    for size in (100_000, 1_000_000):
        assert len(call("a", "b", make, size)) == size
        wait_until(lambda: not any(session.requests.replies for session in agents["b"].peers.sessions()))


# --- connections that end ---


def test_a_connection_that_breaks_before_a_call(two: dict[str, Agent]) -> None:
    faults = Faults({"PythonCall": FaultPlan(Fault.BREAK, times=2)})
    agents["a"].connector.fit_out = faults.on
    assert [call("a", "b", count, "x") for _ in range(3)] == [1, 2, 3]
    assert faults.happened("PythonCall") == 2


@pytest.mark.parametrize("cut_by", ["caller", "callee"])
def test_a_connection_cut_while_a_call_runs(two: dict[str, Agent], cut_by: str) -> None:
    """The request is known over there, so it does not run again; its reply comes over the next connection."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, "a", "b", wait_at_gate, "once")
        assert entered.wait(60)
        _cut(cut_by)
        assert call("a", "b", count, "meanwhile") == 1  # the link is back
        gate.set()
        assert waiting.result(60) == "once"
    assert ran["once"] == 1


def test_a_reply_lost_with_its_connection_is_sent_again(two: dict[str, Agent]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, "a", "b", wait_at_gate, "once")
        assert entered.wait(60)
        (session,) = [s for s in agents["b"].peers.sessions() if s.member.name == "a"]
        connection = session.connection
        assert connection is not None
        answered = threading.Event()

        def lose(*args: Any, **kwargs: Any) -> None:
            connection.stream.close()
            answered.set()
            raise ConnectionResetError("cut")

        connection.send_encoded = lose
        gate.set()
        assert answered.wait(60)
        assert waiting.result(60) == "once"
    assert ran["once"] == 1


def _cut(by: str) -> None:
    if by == "caller":
        connection = agents["a"].link(agents["b"].member).current
    else:
        (session,) = [s for s in agents["b"].peers.sessions() if s.member.name == "a"]
        connection = session.connection
    assert connection is not None
    connection.stream.close()


# --- leaving and dying ---


def test_a_record_of_leaving_takes_no_answer_away(two: dict[str, Agent]) -> None:
    """The news may be read while the last answer is still on its way."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, "a", "b", wait_at_gate, "last")
        assert entered.wait(60)
        agents["a"].peers.learn([msgspec.structs.replace(agents["b"].member, leaving=True)])
        assert not agents["a"].is_dead(agents["b"].member)
        gate.set()
        assert waiting.result(60) == "last"
    agents["b"].close()
    wait_until(lambda: agents["a"].is_dead(agents["b"].member))
    with pytest.raises(WorkerDied, match="'b'"):
        call("a", "b", count, "x")


def test_a_record_of_leaving_of_one_never_met_is_its_end(two: dict[str, Agent]) -> None:
    agents["a"].peers.learn([msgspec.structs.replace(agents["b"].member, leaving=True)])
    assert agents["a"].is_dead(agents["b"].member)


def test_one_that_left_comes_back_under_its_id_before_its_end_was_seen(two: dict[str, Agent]) -> None:
    """Nothing waits for ever on the one that was."""
    before = agents["b"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, "a", "b", wait_at_gate, "never answered")
        assert entered.wait(60)
        agents["a"].peers.learn([msgspec.structs.replace(before.member, leaving=True)])
        agents["b"] = start_agent("b", 1)
        try:
            introduce()
            assert call("a", "b", count, "the new one") == 1
            with pytest.raises(WorkerDied, match="'b' was started again"):
                waiting.result(60)
            # Whoever still holds the record of the old one does no harm to the new one.
            assert agents["a"].link(before.member).dead is not None
            assert call("a", "b", count, "the new one") == 2
        finally:
            gate.set()
            before.close()


def test_an_end_without_a_word(two: dict[str, Agent]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, "a", "b", wait_at_gate, "unanswered")
        assert entered.wait(60)
        agents["b"].close(farewell=False)
        with pytest.raises(WorkerDied, match=r"'b'.*wait_at_gate"):
            waiting.result(60)
        gate.set()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "socket"])
def test_the_last_answers_of_a_burst_are_delivered(shared: bool) -> None:
    """An answer that waits in its connection for others counts as given, and must leave before the goodbye."""
    with office("a", "b", shared_memory=shared, heartbeat=60.0), ThreadPoolExecutor(1) as pool:
        call("a", "b", count, "warm")
        (session,) = [s for s in agents["b"].peers.sessions() if s.member.name == "a"]
        connection = session.connection
        assert connection is not None
        send, held = connection.send_encoded, threading.Event()

        def hold_back(frame: bytes, deadline: float | None = None, hold: bool = False) -> None:
            send(frame, deadline, True)
            held.set()

        connection.send_encoded = hold_back
        waiting = pool.submit(call, "a", "b", count, "held")
        assert held.wait(60)
        wait_until(lambda: not agents["b"].under_way())
        session.deliver(time.monotonic() + 60)
        assert waiting.result(60) == 1


@pytest.mark.parametrize("has_more", [True, False])
def test_what_others_wait_for_is_held_back_only_by_a_thread_that_has_more_to_serve(
    has_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pass that goes to and fro, each message is waited for, however soon it follows the one before."""
    with office("a", "b", heartbeat=60.0):
        call("a", "b", count, "warm")
        agent = agents["a"]
        link = agent.link(agent.find("b"))
        waiting = [start_call(agent, link, wait_at_gate, (f"{n}",), {}, 90.0) for n in range(BURST_CALLS + 1)]
        connection = link.current
        assert connection is not None
        send, held = connection.send_encoded, []

        def note(frame: bytes, deadline: float | None = None, hold: bool = False) -> None:
            held.append(hold)
            send(frame, deadline, hold)

        connection.send_encoded = note
        monkeypatch.setattr(local, "turn", SimpleNamespace(has_more=has_more))
        answered = threading.Semaphore(0)
        for _ in range(3):
            link.send(Ping(), timeout=0.0, what="a test", complete=lambda _: answered.release(), prompt=True)
        monkeypatch.setattr(local, "turn", None)
        assert held == [has_more] * 3
        for _ in range(3):
            assert answered.acquire(timeout=60)
        gate.set()
        for future in waiting:
            wait_for_value(future)


def has_more() -> bool:
    assert local.turn is not None
    return local.turn.has_more


def test_a_thread_has_more_to_serve_while_what_came_along_waits() -> None:
    with office("a", "b", heartbeat=60.0):
        call("a", "b", has_more)
        agent = agents["a"]
        link = agent.link(agent.find("b"))
        connection = link.current
        assert connection is not None
        send = connection.send_encoded
        connection.send_encoded = lambda frame, deadline=None, hold=False: send(frame, deadline, True)
        waiting = [start_call(agent, link, has_more, (), {}, 90.0) for _ in range(2)]
        connection.send_encoded = send
        connection.flush()
        assert [wait_for_value(one) for one in waiting] == [True, False]


# --- the transport itself ---


def test_a_listener_that_closed_refuses() -> None:
    listener = MemoryListener()
    waiting = dial_memory(listener.name)
    listener.close()
    assert waiting.recv(1) == b""
    waiting.close()
    with pytest.raises(ConnectionRefusedError):
        dial_memory(listener.name)
    listener.close()


def test_a_wrong_secret_is_refused_here_too(two: dict[str, Agent]) -> None:
    agents["a"].connector.secret = b"another"
    with pytest.raises(AuthenticationError, match=r"'b'.*secret"):
        call("a", "b", count, "x")
    assert not ran


# --- streams of CUDA, as far as they go without a GPU ---

_steps: list[tuple[str, int, Any]] = []


async def add_one(x: torch.Tensor) -> torch.Tensor:
    _steps.append(("ran", threading.get_ident(), None))
    return x + 1


def test_a_coroutine_follows_what_its_arguments_were_made_on(
    two: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in another thread than the one that made its arguments, on other streams."""
    _steps.clear()
    monkeypatch.setattr(order, "active", True)
    follow = order.follow

    def noted(made: order.Mark) -> None:
        _steps.append(("followed", threading.get_ident(), [x.tolist() for x in made.tensors]))
        follow(made)

    monkeypatch.setattr(order, "follow", noted)
    assert call("a", "b", add_one, torch.tensor([3.0])).tolist() == [4.0]
    followed, ran_then = [step for step in _steps if step[1] != threading.get_ident()]
    assert (followed[0], followed[2], ran_then[0]) == ("followed", [[3.0]], "ran")
    assert followed[1] == ran_then[1], "in one thread, the loop's"


def test_a_coroutine_that_cannot_follow_fails(two: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "active", True)

    def refuse(_: order.Mark) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(order, "follow", refuse)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        call("a", "b", add_one, torch.tensor([3.0]))
