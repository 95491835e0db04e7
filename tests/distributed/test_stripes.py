"""Large tensors over several TCP connections between real workers: right numbers, and what follows when one breaks."""

import functools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import AuthenticationError, RpcTimeout
from telegrad.rpc.client.link import Link
from telegrad.rpc.current import require_agent
from telegrad.rpc.server.session import Session
from telegrad.transport.handshake import Hello
from telegrad.transport.stream import SocketStream
from telegrad.transport.stripes.sealed_stream import SealedStream
from tests.attacks.strangers import lying_member
from tests.cluster import cluster
from tests.waiting import wait_until

SECRET = "told to all, and long"
SIZE = 2**20  # elements: 4 MB
STREAMS = 3
_calls: dict[str, int] = {}


@pytest.fixture(scope="module", params=[False, True], ids=["tcp", "tls"])
def job(request: pytest.FixtureRequest) -> Iterator[bool]:
    options = {"transports": ("tcp",), "tls": request.param, "secret": SECRET, "tcp_connections": STREAMS}
    with cluster(3, heartbeat=5, **options):  # nobody is asked whether it lives while it waits for a part
        yield request.param


def link_to(name: str) -> Link:
    agent = require_agent()
    return agent.link(agent.find(name))


def widen(name: str) -> tuple[SocketStream, ...]:
    """Large messages until the connection to a worker has others beside it; those."""
    x = torch.ones(SIZE)

    def is_wide() -> bool:
        assert torch.equal(rpc.rpc_sync(name, torch.neg, args=(x,), timeout=60), -x)
        current = link_to(name).current
        return current is not None and current.stripes is not None and current._striped

    wait_until(is_wide)
    is_wide()  # once more: the last one may have gone while the others were being put there
    current = link_to(name).current
    assert current is not None and current.stripes is not None and current.stripes.count == STREAMS
    return current.stripes._sides


def count_and_scale(key: str, x: torch.Tensor) -> torch.Tensor:
    _calls[key] = _calls.get(key, 0) + 1
    return 2 * x


def calls_of(key: str) -> int:
    return _calls.pop(key, 0)


def bytes_on_sides() -> int:
    """On a worker: whether what it answers is divided, too, by what it has written beside its first connections."""
    agent = require_agent()
    connections = [session.connection for session in agent.peers.sessions()]
    return sum(c is not None and c.stripes is not None and c._striped for c in connections)


@pytest.mark.slow
def test_a_step_with_large_tensors_is_that_of_one_process(job: bool) -> None:
    widen("worker1")
    wait_until(lambda: rpc.rpc_sync("worker1", bytes_on_sides) == 1)
    x = torch.randn(SIZE, requires_grad=True)
    noise = torch.randn(3, SIZE // 2 + 1)
    with autograd.context() as context:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, x), timeout=60)
        z = rpc.rpc_sync("worker1", torch.cat, args=([y, noise.flatten(), torch.ones(3)],), timeout=60)
        autograd.backward(context, [z.sum()], timeout=60)
        assert torch.equal(autograd.get_gradients(context)[x], 2 * x.detach())
    assert torch.equal(z.detach(), torch.cat([(x * x).detach(), noise.flatten(), torch.ones(3)]))


@pytest.mark.slow
def test_many_callers_of_one_link(job: bool) -> None:
    """Several threads send large and small messages over one connection, and futures are read by whoever comes."""
    widen("worker1")
    failures: list[object] = []

    def call(seed: int) -> None:
        random_ = random.Random(seed)
        for _ in range(4):
            x = torch.full((random_.choice([3, SIZE // 2, SIZE + 17]),), float(seed))
            future = rpc.rpc_async("worker1", torch.add, args=(x, 1), timeout=60)
            y = rpc.rpc_sync("worker1", torch.neg, args=(x,), timeout=60)
            if not torch.equal(y, -x) or not torch.equal(future.wait(), x + 1):
                failures.append((seed, x.numel()))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)


@pytest.mark.slow
def test_a_stream_that_is_cut_is_a_connection_that_is_cut(job: bool, long_profile: bool) -> None:
    """At random moments, any of the streams: each call runs once and has its answer, over the next connection."""
    generator = random.Random(None if long_profile else 5)
    x = torch.randn(2 * SIZE)
    for turn in range(100 if long_profile else 5):
        sides = widen("worker2")
        current = link_to("worker2").current
        assert current is not None and isinstance(current.stream, SocketStream)
        victim = generator.choice([current.stream, *sides])
        timer = threading.Timer(generator.uniform(0, 0.06), victim.abort)
        timer.start()
        for i in range(3):
            key = f"cut {turn} {i}"
            assert torch.equal(rpc.rpc_sync("worker2", count_and_scale, args=(key, x), timeout=60), 2 * x)
            assert rpc.rpc_sync("worker2", calls_of, args=(key,)) == 1
        timer.join()


def _flip_a_bit() -> None:
    """Somebody between the workers changes what goes over the first of the streams beside a connection next."""
    links = [link.current for link in require_agent().peers.links()]
    for connection in [*links, *(session.connection for session in require_agent().peers.sessions())]:
        side = connection.stripes._sides[0] if connection is not None and connection.stripes is not None else None
        if isinstance(side, SealedStream):
            seal = side._sealer.seal

            def flip(piece: memoryview, left: int, into: memoryview, seal: Any = seal) -> None:
                seal(piece, left, into)
                into[1000] ^= 1

            side._sealer.seal = flip  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["request", "reply"])
def test_what_was_changed_on_its_way_is_sent_again(job: bool, way: str, caplog: pytest.LogCaptureFixture) -> None:
    if not job:
        pytest.skip("plain TCP notices nothing")
    sides = widen("worker2")
    assert all(isinstance(side, SealedStream) for side in sides)
    before = link_to("worker2").current
    x = torch.randn(SIZE)
    if way == "request":
        _flip_a_bit()
    else:
        rpc.rpc_sync("worker2", _flip_a_bit)
    key = f"flipped {way}"
    assert torch.equal(rpc.rpc_sync("worker2", count_and_scale, args=(key, x), timeout=60), 2 * x)
    assert rpc.rpc_sync("worker2", calls_of, args=(key,)) == 1
    assert link_to("worker2").current is not before
    if way == "reply":
        assert "worker 'worker2' is not the one that was sealed" in caplog.text


def _without_sealing(to: str) -> list[str]:
    """On a worker that cannot seal: what it has beside its connection to another, once it sent large tensors there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("telegrad.rpc.peers.widen.can_seal", lambda: False)
        return [type(side).__name__ for side in widen(to)]


def test_one_end_that_cannot_seal(job: bool) -> None:
    """Both ends use what `ssl` does, as without the package."""
    if not job:
        pytest.skip("nothing is sealed there")
    assert rpc.rpc_sync("worker1", _without_sealing, args=("worker2",), timeout=60) == ["TlsStream"] * (STREAMS - 1)


def test_only_what_is_encrypted_can_be_sealed(job: bool) -> None:
    if job:
        pytest.skip("it is")
    assert "said over TLS" in rpc.rpc_sync("worker1", _in_a_place, args=(1, 1, bytes(32)))


_parts_may_go = threading.Event()


def _hold_parts() -> None:
    """On a worker: the second part of whatever it answers next comes when it is told."""
    _parts_may_go.clear()
    for session in require_agent().peers.sessions():
        if session.connection is not None and session.connection.stripes is not None:
            side = session.connection.stripes._sides[0]

            def late(*args: Any, side: SocketStream = side) -> None:
                del side.send  # type: ignore[method-assign] # back to what it was
                _parts_may_go.wait(90)
                side.send(*args)

            side.send = late  # type: ignore[method-assign]


def _let_parts_go() -> None:
    _parts_may_go.set()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "future"])
def test_a_part_that_is_late_keeps_no_caller_beyond_its_deadline(job: bool, how: str) -> None:
    """Whoever waits for it is told in time; then the connection goes on as it was."""
    widen("worker1")
    before = link_to("worker1").current
    x = torch.ones(SIZE)
    rpc.rpc_sync("worker1", _hold_parts)
    if how == "future":
        future = rpc.rpc_async("worker1", torch.neg, args=(x,), timeout=1.5)
        wait_until(future.done)  # no thread reads for it
        result = future.wait
    else:
        result = functools.partial(rpc.rpc_sync, "worker1", torch.neg, args=(x,), timeout=1.5)
    with pytest.raises(RpcTimeout):
        result()
    released = rpc.rpc_async("worker1", _let_parts_go)  # its reply comes behind what was held
    assert torch.equal(rpc.rpc_sync("worker1", torch.neg, args=(x,), timeout=60), -x)
    released.wait()
    assert link_to("worker1").current is before


def test_nobody_else_puts_a_stream_beside_a_connection(job: bool) -> None:
    """One who knows the secret but not the ticket of the link, and one who has no such connection."""
    if job:
        pytest.skip("with TLS the stranger would need the certificate as well")
    sides = rpc.rpc_sync("worker1", _beside_a_stranger)
    assert "is another's" in sides[0]
    assert "no such connection" in sides[1]
    assert "no such connection" in sides[2]


def _beside_a_stranger() -> list[str]:
    """On worker1, whose sessions are those of worker0 and others: dial it as one of them."""
    agent = require_agent()
    session = next(s for s in agent.peers.sessions() if s.connection is not None)
    connection = session.connection
    assert connection is not None
    member = session.member
    base = (member.worker_id, member.name, member.incarnation, agent.member.incarnation, session.number, False, "main")
    said = []
    for hello in (
        Hello(*base, ticket=bytes(16), connection=connection.number, side=1, sides=1),
        Hello(*base, ticket=session.ticket, connection=connection.number + 1, side=1, sides=1),
        Hello(*base, ticket=session.ticket, connection=0, side=1, sides=1),
    ):
        try:
            with lying_member(agent, kind="tcp", hello=hello):
                said.append("let in")
        except AuthenticationError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("side", "sides"), [(2, 1), (-1, 1), (1, 16), (1, 2**40)], ids=["beyond", "below", "too many", "far too many"]
)
def test_a_place_that_cannot_be_is_refused(job: bool, side: int, sides: int) -> None:
    if job:
        pytest.skip("the same without TLS")
    assert "no connection can be put there" in rpc.rpc_sync("worker1", _in_a_place, args=(side, sides))


def _in_a_place(side: int, sides: int, seal: bytes = b"") -> str:
    agent = require_agent()
    session = next(s for s in agent.peers.sessions() if s.connection is not None)
    assert session.connection is not None
    member = session.member
    base = (member.worker_id, member.name, member.incarnation, agent.member.incarnation, session.number, False, "main")
    number = session.connection.number
    hello = Hello(*base, ticket=session.ticket, connection=number, side=side, sides=sides, seal=seal)
    try:
        with lying_member(agent, kind="tcp", hello=hello):
            return "let in"
    except AuthenticationError as error:
        return str(error)


def hand_over_slowly(seconds: float) -> None:
    """A thread of this worker takes its time between its decision to read no more and the moment when another may."""
    usual = getattr(Session._hand_over, "__wrapped__", Session._hand_over)

    @functools.wraps(usual)
    def slow(self: Session, *args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        usual(self, *args, **kwargs)

    Session._hand_over = slow if seconds else usual  # type: ignore[method-assign]


def test_a_part_that_comes_while_the_turn_changes_hands_is_read(job: bool) -> None:
    widen("worker1")
    x = torch.ones(4 * SIZE)
    rpc.rpc_sync("worker1", hand_over_slowly, args=(0.0005,))
    try:
        for _ in range(60):
            assert rpc.rpc_sync("worker1", torch.numel, args=(x,), timeout=4) == 4 * SIZE  # less than until a heartbeat
    finally:
        rpc.rpc_sync("worker1", hand_over_slowly, args=(0.0,))
