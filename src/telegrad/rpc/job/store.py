"""A TCP store of torch's lives in the process of one worker and ends with it. Here it is opened, joined and watched.

Whoever may open it tries to take the port: one gets it, the others connect. A bare connection beside torch's own tells
when the store has ended: torch's client would find out only by being used, and would complain on stderr.

That connection goes to a beacon: a socket beside the store that listens, says nothing and ends with it. The store
itself looks up the name of whoever connects, and everyone waits while it does; a resolver that does not answer takes
5 seconds. It listens at the address it was given and at no other, and a store that another user holds is not joined.
"""

import errno
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

from torch._C._distributed_c10d import TCPStore

from telegrad.errors import RendezvousError
from telegrad.transport.addresses import is_loopback

_CONNECT_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_LISTENING = "0A"  # in /proc/net/tcp
_BYTE_ORDER = -1 if sys.byteorder == "little" else 1
_BEACON = "telegrad/beacon"
_BEACON_LOOKS = 50

Place = tuple[str, int]  # host and port


def place_in(init_method: str) -> Place | None:
    """Where a store is to be found by `init_method`; None if it is not of that kind, or not in its plain form."""
    url = urlparse(init_method)
    if url.query:
        return None
    if url.scheme == "tcp" and url.hostname and url.port:
        return url.hostname, url.port
    return _place_in_environment() if url.scheme == "env" else None


def _place_in_environment() -> Place | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdecimal() else None


def is_launchers(place: Place) -> bool:
    """Whether the store there is the launcher's, by torch's own sign for it: no worker opens it, and it stays."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and place == _place_in_environment()


def place_of(store: Any) -> Place | None:
    """Where a store is, if it is one that ends with a worker."""
    place = address_of(store)
    return None if place is None or is_launchers(place) else place


def address_of(store: Any) -> Place | None:
    """The address of a store that has one."""
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def open_or_join(place: Place, *, opens: bool, seconds: float) -> TCPStore:
    """The store at `place`, opened here if `opens` and nobody else was quicker. TimeoutError at the deadline."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while True:
        left = deadline - time.monotonic()
        try:
            return attempt(place, opens=opens, seconds=max(left, 1e-3))
        except OSError as error:
            if left <= 0:
                raise TimeoutError(f"{place[0]}:{place[1]}: {error}") from error
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)


def attempt(place: Place, *, opens: bool, seconds: float) -> TCPStore:
    """The store at `place`, opened or joined now. OSError if there is none, and none can be opened here."""
    host, port = place
    limit = timedelta(seconds=seconds)
    if opens:
        taken = _take(place)
        if taken is not None:
            # Shared with whatever else of torch's wants a store at this port in this process.
            store = TCPStore(
                host,
                port,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=taken.detach(),
            )
            _light_beacon(store, host)
            return store
    _check_holder(place)
    if not _listens_here(port):  # torch's client would say on stderr that nobody is there
        watch(place, min(seconds, _CONNECT_SECONDS)).close()
    return TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def _take(place: Place) -> socket.socket | None:
    """A socket that listens at `place`; None if another does."""
    try:
        return _listener(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def _listener(place: Place) -> socket.socket:
    """A socket that listens at the address it was given, and at no other."""
    host, port = place
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


def _listens_here(port: int) -> bool:
    """Whether a process of this machine is known to listen at `port`. Costs no connection."""
    return any(listening == port for _, listening, _ in _listening())


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


def _check_holder(place: Place) -> None:
    """Raise unless the store on this machine is one of this user's, or of root: a stranger may have been first."""
    host, port = place
    meant = {socket.inet_pton(family, address) for family, address in _addresses(host)}
    users = {uid for address, at, uid in _listening() if at == port and (address in meant or not any(address))}
    strangers = users - {os.getuid(), 0}
    if strangers and is_here(host):
        raise RendezvousError(
            f"port {port} is held by a process of another user (uid {', '.join(map(str, sorted(strangers)))}); its "
            "store was not joined. Choose another port (MASTER_PORT)"
        )


def _light_beacon(store: TCPStore, host: str) -> None:
    beacon = _listener((host, 0))  # those who connect stay in its backlog, and are never accepted
    weakref.finalize(store, beacon.close)
    store.set(_BEACON, str(beacon.getsockname()[1]))


def watch_store(store: TCPStore, place: Place) -> socket.socket:
    """A connection that ends when the store at `place` does."""
    for _ in range(_BEACON_LOOKS):  # whoever opened the store is about to say where
        if store.check([_BEACON]):
            try:
                return watch((place[0], int(store.get(_BEACON))))
            except OSError:
                break  # between hosts there may be a wall that lets only the store's own port through
        time.sleep(_FIRST_PAUSE)
    return watch(place)


def watch(place: Place, seconds: float = _CONNECT_SECONDS) -> socket.socket:
    """A connection to whoever listens at `place`. Nothing is said over it; it ends when the listener does."""
    return socket.create_connection(place, seconds)


def endures(place: Place, seconds: float) -> bool:
    """Whether somebody listens at `place`, and still does a moment later."""
    try:
        with watch(place) as sock:
            sock.settimeout(seconds)
            sock.recv(1)
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


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
