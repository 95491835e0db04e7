"""Where a worker listens and how it is reached: by Unix socket on one host, by TCP otherwise; in tests by neither."""

import contextlib
import functools
import hashlib
import ipaddress
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from telegrad.transport.memory import MemoryListener, dial_memory

UNIX = "unix"
TCP = "tcp"
MEMORY = "memory"  # between agents of one process
TRANSPORTS = (UNIX, TCP)  # those that are used unless an option says otherwise
ALL_TRANSPORTS = (*TRANSPORTS, MEMORY)
_BACKLOG = 512
_FULL_SECONDS = 0.005
_IDENTITY_DIGITS = 24


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One place where a worker can be reached."""

    kind: str  # "unix", "tcp" or "memory"
    host: str  # for unix and memory: the identity of the host or process, outside which the path or name means nothing
    where: str  # a path, "@name" for a Linux socket that is in no file system, a port, or a name


def host_identity() -> str:
    """What two processes share exactly if they can reach each other's Unix sockets and see each other's process ids."""
    parts = _boot_identity()
    for namespace in ("/proc/self/ns/net", "/proc/self/ns/mnt", "/proc/self/ns/pid"):  # which a process may leave
        with contextlib.suppress(OSError):
            parts += (os.readlink(namespace),)
    # Hashed: it is in every worker's record several times, and every worker of a job reads those of all.
    return hashlib.sha256("|".join(parts or (socket.gethostname(),)).encode()).hexdigest()[:_IDENTITY_DIGITS]


@functools.cache
def _boot_identity() -> tuple[str, ...]:
    try:
        return (Path("/proc/sys/kernel/random/boot_id").read_text().strip(),)
    except OSError:
        return ()


def is_loopback(host: str) -> bool:
    """Whether an address, or the name of one, leads to this very machine wherever it is used."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _process_identity(host: str) -> str:
    return f"{host}|{os.getpid()}"


class Listeners:
    """The listening sockets of one worker, and what they leave behind in the file system until closed."""

    def __init__(self, transports: Sequence[str], host: str) -> None:
        self.sockets: list[socket.socket | MemoryListener] = []
        self.addresses: list[Address] = []
        self._folder: str | None = None
        self._pid = os.getpid()
        try:
            if UNIX in transports:
                self._listen_unix()
            if TCP in transports:
                self._listen_tcp(host)
            if MEMORY in transports:
                self._listen_memory()
        except OSError:
            self.close()
            raise

    def _listen_unix(self) -> None:
        # Where there are sockets without a file, a worker that is killed leaves nothing behind. Anyone on the host may
        # dial one, as with TCP: the handshake decides.
        if sys.platform == "linux":
            path = f"@telegrad-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="telegrad-")
            path = os.path.join(self._folder, "s")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets.append(sock)
        sock.bind(_unix_name(path))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        self.addresses.append(Address(UNIX, host_identity(), path))

    def _listen_tcp(self, host: str) -> None:
        family, kind, proto, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        self.sockets.append(sock)
        sock.bind(where)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        bound = sock.getsockname()
        self.addresses.append(Address(TCP, str(bound[0]), str(bound[1])))

    def _listen_memory(self) -> None:
        listener = MemoryListener()
        self.sockets.append(listener)
        self.addresses.append(Address(MEMORY, _process_identity(host_identity()), listener.name))

    def close(self) -> None:
        """Stop listening and remove what lies in the file system (a forked child leaves its parent's alone)."""
        for sock in self.sockets:
            sock.close()
        if self._folder is not None and os.getpid() == self._pid:
            shutil.rmtree(self._folder, ignore_errors=True)


def _unix_name(where: str) -> str:
    return f"\0{where[1:]}" if where.startswith("@") else where


def reachable(addresses: Sequence[Address], transports: Sequence[str]) -> list[Address]:
    """The addresses to try, best first."""
    host = host_identity()
    here = {MEMORY: _process_identity(host), UNIX: host}
    order = [kind for kind in (MEMORY, UNIX, TCP) if kind in transports]
    return [a for kind in order for a in addresses if a.kind == kind and here.get(kind, a.host) == a.host]


def _connect_unix(sock: socket.socket, name: str, timeout: float) -> None:
    """Connect; where the listener's queue is full, Unix sockets say so at once instead of waiting."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(name)
            sock.settimeout(timeout)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError("the listener's queue is full") from None
            time.sleep(_FULL_SECONDS)


def connect(address: Address, timeout: float) -> socket.socket:
    """A connected socket, still blocking with `timeout`."""
    if address.kind == UNIX:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect_unix(sock, _unix_name(address.where), timeout)
        except BaseException:
            sock.close()
            raise
        return sock
    if address.kind == MEMORY:
        sock = dial_memory(address.where)
        sock.settimeout(timeout)
        return sock
    return socket.create_connection((address.host, int(address.where)), timeout)
