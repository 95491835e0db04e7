"""A client of torch's TCP store: the same requests over the wire, with deadlines and without output.

torch's own client waits without limit for whoever listens at the port and says nothing, tries again for minutes where
something else answers, and writes a C++ stack trace to stderr each time the store's process ends. This one asks who is
there, gives up at its deadline, and raises: `StoreClosed` when the store has ended, `NotAStore` when what listens at
the port is something else. The server is torch's (`store.py` opens it; under torchrun it is the launcher's), so process
groups and Telegrad may share one.

One request at a time, by any thread; a lock orders them.
"""

import secrets
import socket
import struct
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

# The requests of torch's protocol, as its server numbers them.
_VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _CHECK, _NUM_KEYS, _DELETE, _PING = 0, 1, 2, 3, 4, 5, 7, 8, 13
_MULTI_GET = 10
_MAGIC = struct.pack("<BI", _VALIDATE, 0x3C85F7CE)
_PING_FORM, _NUMBER, _LENGTH = struct.Struct("<BI"), struct.Struct("<q"), struct.Struct("<Q")
_NONCE = struct.Struct("<I")
_READY = b"\x00"
_KEY_PREFIX = "/"  # torch's client puts it before every key
_LONGEST_VALUE = 64 * 2**20
_LOOK_SECONDS = 0.01
_LONGEST_REQUEST = 10.0  # seconds; a store answers at once, and whoever asks it may have better things to do


class StoreClosed(RuntimeError):
    """The store ended, or does not answer. A RuntimeError, like those of torch's stores."""


class NotAStore(OSError):
    """Something listens at the address, and it is no store. A silent one may become one."""

    def __init__(self, message: str, *, is_silent: bool) -> None:
        super().__init__(message)
        self.is_silent = is_silent


class StoreClient(Store):
    """A connection to the store at `host`:`port`. OSError if nobody listens there, NotAStore if it is none."""

    def __init__(self, host: str, port: int, *, connect_seconds: float, timeout: float) -> None:
        super().__init__()
        self._timeout = min(timeout, _LONGEST_REQUEST)
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._sock = socket.create_connection((host, port), connect_seconds)
        weakref.finalize(self, self._sock.close)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet()
        except BaseException:
            self._sock.close()
            raise

    def __repr__(self) -> str:
        return f"<StoreClient of {self._host}:{self._port}>"

    def _greet(self) -> None:
        nonce = secrets.randbits(31)
        try:
            self._sock.sendall(_MAGIC + _PING_FORM.pack(_PING, nonce))
            answer = self._receive(_NONCE.size)
        except TimeoutError:
            raise NotAStore("it takes connections and does not answer as a store would", is_silent=True) from None
        if answer != _NONCE.pack(nonce):
            raise NotAStore(f"it answers with {answer!r}, as no store does", is_silent=False)

    # --- what torch's stores can do, under the same names ---

    @property
    def host(self) -> str:
        """Where the store is."""
        return self._host

    @property
    def port(self) -> int:
        """And at which port."""
        return self._port

    @property
    def timeout(self) -> timedelta:
        """How long a request may take."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a request may take from now on."""
        self._timeout = min(max(timeout.total_seconds(), 1e-3), _LONGEST_REQUEST)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(_SET, _text(_KEY_PREFIX + key) + _text(value), None)

    def get(self, key: str) -> bytes:
        """The value of a key, which is waited for."""
        self.wait([key])
        value: bytes = self._ask(_GET, _text(_KEY_PREFIX + key), self._receive_value)
        return value

    def has_extended_api(self) -> bool:
        """Whether several values can be asked for at once."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there."""
        request = _LENGTH.pack(len(keys)) + b"".join(_text(_KEY_PREFIX + key) for key in keys)
        values: list[bytes] = self._ask(_MULTI_GET, request, lambda: [self._receive_value() for _ in keys])
        return values

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected` (or nothing, and `expected` is empty); what is there then."""
        request = _text(_KEY_PREFIX + key) + _text(expected) + _text(desired)
        value: bytes = self._ask(_COMPARE_SET, request, self._receive_value)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        return int(self._ask(_ADD, _text(_KEY_PREFIX + key) + _NUMBER.pack(amount), self._receive_number))

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there."""
        request = _LENGTH.pack(len(keys)) + b"".join(_text(_KEY_PREFIX + key) for key in keys)
        return bool(self._ask(_CHECK, request, lambda: self._receive(1)) == _READY)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._ask(_DELETE, _text(_KEY_PREFIX + key), self._receive_number))

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask(_NUM_KEYS, b"", self._receive_number))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys are there. StoreClosed at the deadline."""
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise StoreClosed(f"waited {seconds:g} s in the store at {self._host}:{self._port} for {keys}")
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Let the connection go."""
        self._sock.close()

    # --- the wire ---

    def _ask(self, kind: int, request: bytes, answer: Any) -> Any:
        with self._lock:
            try:
                self._sock.settimeout(self._timeout)
                self._sock.sendall(bytes([kind]) + request)
                return None if answer is None else answer()
            except OSError as error:  # half an answer may be on its way: the connection is of no more use
                self._sock.close()
                raise StoreClosed(f"the rendezvous store at {self._host}:{self._port} closed: {error}") from None

    def _receive(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            data = self._sock.recv(size - len(parts))
            if not data:
                raise ConnectionResetError("its process ended")
            parts += data
        return parts

    def _receive_number(self) -> int:
        (number,) = _NUMBER.unpack(self._receive(_NUMBER.size))
        return int(number)

    def _receive_value(self) -> bytes:
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if length > _LONGEST_VALUE:
            raise ConnectionAbortedError(f"it sends a value of {length} bytes")
        return self._receive(length)


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _LENGTH.pack(len(data)) + data


class Prefixed:
    """A part of a store: its keys begin with `prefix`. Keeps the store alive, which torch's PrefixStore does not do for
    one that is written in Python."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """The value of a key."""
        return bytes(self._store.get(self._key(key)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        return int(self._store.add(self._key(key), amount))

    def check(self, key: str) -> bool:
        """Whether a key is there."""
        return bool(self._store.check([self._key(key)]))

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        """The values of all these keys, in one request where the store can do that; None if some are not there."""
        names = [self._key(key) for key in keys]
        if not self._store.check(names):
            return None
        if self._store.has_extended_api():
            return [bytes(value) for value in self._store.multi_get(names)]
        return [bytes(self._store.get(name)) for name in names]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`; what is there then."""
        return bytes(self._store.compare_set(self._key(key), expected, desired))

    def delete_key(self, key: str) -> None:
        """Remove a key."""
        self._store.delete_key(self._key(key))
