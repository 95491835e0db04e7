"""Somebody between two workers: passes bytes on, keeps what it saw, and changes what it likes."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from telegrad.rpc.current import require_agent
from telegrad.rpc.round_trip import start_call, wait_for_value
from telegrad.rpc.workers import Member
from telegrad.transport import tls
from telegrad.transport.addresses import Address

Change = Callable[[bool, bytes], bytes]  # whether it goes to the worker, and what was said: what is passed on instead


class Relay:
    """Between a dialler and a worker; may end TLS itself, with its own key."""

    def __init__(self, to: Address, *, decrypts: bool = False, change: Callable[[], Change] | None = None) -> None:
        """`change` makes what changes the bytes of one connection."""
        self.saw = bytearray()
        self.connections = 0
        self._to = to
        self._change = change
        self._ends = tls.ends_by_fingerprint() if decrypts else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("tcp", "127.0.0.1", str(self._listener.getsockname()[1]))
        self._socks: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._to.host, int(self._to.where)))
                self._socks += [near, far]
                if self._ends is not None:
                    far = self._ends.client.wrap_socket(far)
                    self._socks.append(far)
                    near = self._ends.server.wrap_socket(near, server_side=True, do_handshake_on_connect=False)
                    self._socks.append(near)
                    near.do_handshake()
            except (OSError, ValueError):
                self.close()
                return
            self.connections += 1
            change = None if self._change is None else self._change()
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other, one is near, change), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, to_worker: bool, change: Change | None) -> None:
        try:
            while data := one.recv(65536):
                self.saw += data
                other.sendall(data if change is None else change(to_worker, data))
        except OSError:
            pass
        for sock in (one, other):
            sock.close()

    def close(self) -> None:
        """Both ends of all connections see their end."""
        for sock in self._socks:
            sock.close()


def member_of(name: str) -> Member:
    """A worker, as this one knows it."""
    found = require_agent().directory.by_name(name)
    assert found is not None
    return found


def believe(member: Member) -> None:
    """As if a record of the store had said so."""
    agent = require_agent()
    with agent.peers._lock:
        link = agent.peers._links.pop(member.worker_id, None)
        agent.peers.by_name.clear()
    if link is not None:
        link.close()
    agent.directory._by_name[member.name] = agent.directory._by_id[member.worker_id] = member


def call(member: Member, func: Callable[..., Any], *args: Any, timeout: float = 8.0) -> Any:
    """What it returns on a worker, wherever that is believed to be."""
    agent = require_agent()
    return wait_for_value(start_call(agent, agent.link(member), func, args, {}, timeout))


def tcp_of(member: Member) -> Address:
    """Where it listens."""
    return next(a for a in member.addresses if a.kind == "tcp")
