"""A TCP store of torch's lives in the process of one worker and ends with it. Here it is opened, joined and monitored.

Whoever may open it tries to take the port: one gets it, the others connect (`store_client.py`). A bare connection
beside that one tells when the store has ended, which a client that is not being used would not notice.

That connection goes to a monitor port: a socket beside the store that listens and ends with it. The only thing it ever
says is the last record of a worker whose program ends with its store, which nobody could read there any more. The store
itself looks up the name of whoever connects, and everyone waits while it does; a resolver that does not answer takes
5 seconds. It listens at the address it was given and at no other, and a store that another user holds is not joined.
"""

import contextlib
import errno
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from torch._C._distributed_c10d import FileStore as TorchFileStore
from torch._C._distributed_c10d import TCPStore

from telegrad.errors import RendezvousError
from telegrad.rpc.job.rendezvous.file_store import FileStore
from telegrad.rpc.job.rendezvous.port_holder import listens_in_this_process, who_listens
from telegrad.rpc.job.rendezvous.store_client import NotAStore, StoreClient
from telegrad.transport.addresses import is_loopback

log = logging.getLogger("telegrad.rpc")

_CONNECT_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_FIRST_NOTICE = 5.0  # seconds of waiting after which a line says for what
_LISTENING = "0A"  # in /proc/net/tcp
_BYTE_ORDER = -1 if sys.byteorder == "little" else 1
_MONITOR_PORT = "telegrad/monitor port"
_MONITOR_LOOKS = 50
_LONGEST_RECORD = 1 << 16
_monitor_ports: "weakref.WeakKeyDictionary[TCPStore, socket.socket]" = (
    weakref.WeakKeyDictionary()
)  # of stores opened here

Endpoint = tuple[str, int]  # host and port


def endpoint_in(init_method: str) -> Endpoint | None:
    """Where a store is to be found by `init_method`; None if it is not of that kind, or not in its plain form."""
    try:
        url = urlparse(init_method)
        if url.query:
            return None
        if url.scheme == "tcp" and url.hostname and url.port:
            return url.hostname, url.port
    except ValueError as error:  # the port is none, or a bracket is missing
        raise RendezvousError(f"cannot meet at {init_method!r}: {error}. Give it as tcp://host:port") from None
    return _endpoint_in_environment() if url.scheme == "env" else None


def _endpoint_in_environment() -> Endpoint | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdecimal() else None


def names_a_place() -> bool:
    """Whether the environment says, rightly or wrongly, where to meet."""
    return "MASTER_ADDR" in os.environ or "MASTER_PORT" in os.environ


def is_launchers(endpoint: Endpoint) -> bool:
    """Whether the store there is the launcher's, by torch's own sign for it: no worker opens it, and it stays."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and endpoint == _endpoint_in_environment()


def worker_endpoint_of(store: Any) -> Endpoint | None:
    """Where a store is, if it is one that ends with a worker."""
    endpoint = endpoint_of(store)
    return None if endpoint is None or is_launchers(endpoint) else endpoint


def endpoint_of(store: Any) -> Endpoint | None:
    """Where a store is, if it is reached over the network."""
    return (store.host, store.port) if isinstance(store, TCPStore | StoreClient) else None


def describe(store: Any) -> str:
    """A store in words."""
    endpoint = endpoint_of(store)
    if endpoint is not None:
        return f"{endpoint[0]}:{endpoint[1]}"
    if isinstance(store, FileStore | TorchFileStore):
        return str(getattr(store, "path", "a file"))
    return f"the given {type(store).__name__}"


def may_begin(store: Any) -> bool:
    """Whether a job may begin in this store: in one that was opened here or is kept for all, and not in one that
    another process opened, which has begun its job there already or is a stranger's."""
    if not isinstance(store, StoreClient):
        return True
    return is_launchers((store.host, store.port)) or listens_in_this_process(store.port)


def namespace(store: Any) -> str:
    """The part of a store that belongs to this job. A launcher's store outlives its workers: torchrun starts all of
    them again after a failure, and in another number when nodes come or go, and none of those before counts."""
    endpoint = endpoint_of(store)
    if endpoint is None or not is_launchers(endpoint):
        return "telegrad"
    attempt, size = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"))
    return f"telegrad/attempt {attempt} of {size}"


def open_or_join(endpoint: Endpoint, *, opens: bool, seconds: float) -> Any:
    """The store at `endpoint`, opened here if `opens` and nobody else was quicker. TimeoutError at the deadline."""
    began = time.monotonic()
    pause, next_notice = _FIRST_PAUSE, began + _FIRST_NOTICE
    while True:
        now = time.monotonic()
        left = began + seconds - now
        try:
            return attempt(endpoint, opens=opens, seconds=max(left, 1e-3))
        except NotAStore as error:
            # It may be a store that is only about to be opened, but not for whoever would open it.
            if opens or left <= 0 or not error.is_silent:
                raise _held(endpoint, error) from error
        except OSError as error:
            if left <= 0:
                raise TimeoutError(f"{endpoint[0]}:{endpoint[1]}: {error}") from error
        if now >= next_notice:
            log.warning("waiting for the rendezvous store at %s:%d since %.0f s", *endpoint, now - began)
            next_notice = now + (now - began)
        time.sleep(min(pause, max(left, 0.0)))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _held(endpoint: Endpoint, error: NotAStore) -> RendezvousError:
    holder = who_listens(endpoint[1]) if is_here(endpoint[0]) else None
    by = "another program" if holder is None else holder
    return RendezvousError(f"port {endpoint[1]} of {endpoint[0]} is held by {by}: {error}. Give this job another port")


def attempt(endpoint: Endpoint, *, opens: bool, seconds: float) -> Any:
    """The store at `endpoint`, opened or joined now. OSError if there is none, and none can be opened here."""
    host, port = endpoint
    if opens:
        taken = _take(endpoint)
        if taken is not None:
            # Shared with whatever else of torch's wants a store at this port in this process.
            store = TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=taken.detach(),
            )
            _open_monitor_port(store, host)
            return store
    _check_holder(endpoint)
    return StoreClient(host, port, connect_seconds=min(seconds, _CONNECT_SECONDS), timeout=seconds)


def _take(endpoint: Endpoint) -> socket.socket | None:
    """A socket that listens at `endpoint`; None if another does."""
    try:
        return _listener(endpoint)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def _listener(endpoint: Endpoint) -> socket.socket:
    """A socket that listens at the address it was given, and at no other."""
    host, port = endpoint
    found = _addresses(host)
    if not is_loopback(host) and all(is_loopback(address) for _, address in found):
        # The name of this machine, in its own hosts file; others know it by another address.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
    family, address = found[0]
    return socket.create_server((address, port), family=family, backlog=4096)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses that a name stands for, those of IPv4 first."""
    found = {
        (family, str(where[0]))
        for family, _, _, _, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        if family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(found, key=lambda one: (one[0] != socket.AF_INET, one[1]))


def _listening() -> Iterator[tuple[bytes, int, int]]:
    """Address, port and user of all that listens on this machine, as far as the system tells."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state == _LISTENING:
                address, _, port = local.partition(":")
                words = bytes.fromhex(address)  # each four bytes in the order of this machine
                network = b"".join(words[i : i + 4][::_BYTE_ORDER] for i in range(0, len(words), 4))
                yield network, int(port, 16), int(uid)


def _check_holder(endpoint: Endpoint) -> None:
    """Raise unless the store on this machine is one of this user's, or of root: a stranger may have been first."""
    host, port = endpoint
    meant = {socket.inet_pton(family, address) for family, address in _addresses(host)}
    users = {uid for address, at, uid in _listening() if at == port and (address in meant or not any(address))}
    strangers = users - {os.getuid(), 0}
    if strangers and is_here(host):
        raise RendezvousError(
            f"port {port} is held by a process of another user (uid {', '.join(map(str, sorted(strangers)))}); its "
            "store was not joined. Choose another port (MASTER_PORT)"
        )


def _open_monitor_port(store: TCPStore, host: str) -> None:
    listener = _listener((host, 0))  # those who connect stay in its backlog until there is something to say
    listener.setblocking(False)
    weakref.finalize(store, listener.close)
    _monitor_ports[store] = listener
    store.set(_MONITOR_PORT, str(listener.getsockname()[1]))


def say_last(store: Any, record: bytes) -> None:
    """Tell all that monitor a store opened here a last record, before the store goes. Waits for nobody."""
    listener = _monitor_ports.get(store) if isinstance(store, TCPStore) else None
    if listener is None:
        return
    with contextlib.suppress(OSError):  # until nobody is left in the backlog
        while True:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                sock.send(record)


def last_record(monitor: socket.socket) -> bytes:
    """What a store said through this connection before it went; empty if it ended without a word."""
    with contextlib.suppress(OSError):
        return monitor.recv(_LONGEST_RECORD, socket.MSG_DONTWAIT)
    return b""


def connect_monitor(store: Any, endpoint: Endpoint) -> socket.socket:
    """A connection that ends when the store at `endpoint` does."""
    for _ in range(_MONITOR_LOOKS):  # whoever opened the store is about to say where
        if store.check([_MONITOR_PORT]):
            try:
                return connect_silent((endpoint[0], int(store.get(_MONITOR_PORT))))
            except OSError:
                break  # between hosts there may be a wall that lets only the store's own port through
        time.sleep(_FIRST_PAUSE)
    return connect_silent(endpoint)


def connect_silent(endpoint: Endpoint, seconds: float = _CONNECT_SECONDS) -> socket.socket:
    """A connection to whoever listens at `endpoint`. Nothing is said over it; it ends when the listener does."""
    return socket.create_connection(endpoint, seconds)


def endures(endpoint: Endpoint, seconds: float) -> bool:
    """Whether somebody listens at `endpoint`, and still does a moment later."""
    try:
        with connect_silent(endpoint) as sock:
            sock.settimeout(seconds)
            sock.recv(1)
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


def why_unknown(host: str) -> str:
    """Why the name of a host does not resolve, in the system's words; empty if it does."""
    try:
        _addresses(host)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: only then does a store opened here stand where others look."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, proto, _, where in found:
        try:
            with socket.socket(family, kind, proto) as sock:
                sock.bind(where)
            return True
        except OSError:
            continue
    return False
