"""Who may put a connection beside another, and how many have such."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.errors import AuthenticationError
from telegrad.rpc.peers.widen import MOST_WIDE, MOST_WIDE_OF_ONE, Widening
from telegrad.transport.addresses import TCP
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import Hello
from telegrad.transport.stream import SocketStream

Open = Callable[[int], Connection]


@pytest.fixture
def connections() -> Iterator[Open]:
    """Makes connections with a number, which are closed in the end."""
    with ExitStack() as stack:

        def make(number: int) -> Connection:
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            connection = Connection(SocketStream(ours, TCP), max_frame=2**20)
            stack.callback(connection.close)
            connection.number = number
            return connection

        yield make


def widening(*, exports_only: bool) -> Widening:
    return Widening(SimpleNamespace(options=SimpleNamespace(exports_only=exports_only)), lambda: 1)  # type: ignore[arg-type]


def session_of(name: str, connection: Connection) -> Any:
    return SimpleNamespace(member=SimpleNamespace(name=name), connection=connection)


def hello(connection: int, name: str = "party") -> Hello:
    return Hello(1, name, 2, 3, 4, False, "", connection=connection, side=1, sides=2)


def test_a_stream_is_put_beside_the_connection_it_was_dialled_for(connections: Open) -> None:
    """The link was resumed over another since this one was found welcome: what it carries is sealed for the old one."""
    session = session_of("party", connections(1))
    widen = widening(exports_only=False)
    widen.check(hello(1), session)
    session.connection = connections(2)
    late = connections(3).stream
    with pytest.raises(AuthenticationError, match="has ended"):
        widen.admit(hello(1), session, late, [session])  # type: ignore[arg-type]
    assert session.connection.gathering is None


@pytest.mark.parametrize(("exports_only", "most"), [(True, MOST_WIDE_OF_ONE), (False, MOST_WIDE)])
def test_a_party_has_so_many_that_are_wide(connections: Open, exports_only: bool, most: int) -> None:
    sessions = [session_of("party", connections(number)) for number in range(1, most + 2)]
    widen = widening(exports_only=exports_only)
    for number, session in enumerate(sessions, start=1):
        beside: Any = connections(0).stream
        if number <= most:
            widen.admit(hello(number), session, beside, sessions)
        else:
            with pytest.raises(AuthenticationError, match=f"{most} connections"):
                widen.admit(hello(number), session, beside, sessions)
    other = session_of("other", connections(999))
    if exports_only:
        widen.admit(hello(999, "other"), other, connections(0).stream, [*sessions, other])  # type: ignore[arg-type]
        assert other.connection.gathering is not None
