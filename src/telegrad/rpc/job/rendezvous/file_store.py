"""A store in a file, as torch's FileStore is, that a worker may be killed or stopped in the middle of using.

It has the requests of torch's stores; how the file is read, written and locked is in `record_file.py`. Whoever has one
is counted in the file, and with the last of a job of fixed size the file goes.
"""

import contextlib
import os
import time
import weakref
from datetime import timedelta

from torch._C._distributed_c10d import Store

from telegrad.errors import RendezvousError
from telegrad.rpc.job.rendezvous.record_file import KEY, LONGEST_REQUEST, RecordFile, Replaced
from telegrad.rpc.job.rendezvous.store_client import StoreClosed

_LOOK_SECONDS = 0.01


class FileStore(Store):
    """The store in the file at `path`, which is made if need be. RendezvousError if it is something else, or cannot be
    used. `workers` says how many there will be: the last of them removes the file. -1: any number, and it stays."""

    def __init__(self, path: str, workers: int = -1, seconds: float = LONGEST_REQUEST) -> None:
        super().__init__()
        self._file = _open(path, seconds)
        weakref.finalize(self, self._file.close, workers, os.getpid())

    def __repr__(self) -> str:
        return f"<FileStore in {self.path}>"

    @property
    def path(self) -> str:
        """Where the store is."""
        return self._file.path

    @property
    def timeout(self) -> timedelta:
        """How long a request may take."""
        return timedelta(seconds=self._file.seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a request may take from now on."""
        self._file.seconds = _limited(timeout.total_seconds())

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._file.change(_key(key), lambda _: _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, which is waited for."""
        return self.multi_get([key])[0]

    def has_extended_api(self) -> bool:
        """Whether several values can be asked for at once."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys, which are waited for."""
        while True:
            self.wait(keys)
            values = self._file.values()
            with contextlib.suppress(KeyError):  # one was removed just then
                return [values[_key(key)] for key in keys]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected` (or nothing, and `expected` is empty); what is there then, or
        `expected` if that is nothing, as with torch's stores."""
        wanted = _bytes(expected)
        found = self._file.change(_key(key), lambda old: _bytes(desired) if (old or b"") == wanted else old)
        return wanted if found is None else found

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum. Adding 0 to one that is there only reads it."""
        found = self._file.values().get(_key(key)) if amount == 0 else None
        if found is None:
            found = self._file.change(_key(key), lambda old: str(int(old or b"0") + amount).encode())
        return int(found or b"0")

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there."""
        values = self._file.values()
        return all(_key(key) in values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        there: list[bool] = []
        self._file.change(_key(key), lambda old: there.append(old is not None))
        return there == [True]

    def num_keys(self) -> int:
        """How many keys there are."""
        return sum(key.startswith(KEY) for key in list(self._file.values()))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys are there. StoreClosed at the deadline."""
        seconds = self._file.seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise StoreClosed(f"waited {seconds:g} s in the store {self.path!r} for {keys}")
            time.sleep(_LOOK_SECONDS)


def _open(path: str, seconds: float) -> RecordFile:
    deadline = time.monotonic() + seconds
    while True:
        try:
            file = RecordFile(path)
        except OSError as error:
            raise RendezvousError(
                f"cannot meet at {path!r}: {error}. Give the path of a file that can be made"
            ) from error
        file.seconds = _limited(seconds)
        try:
            file.enter()
            return file
        except Replaced:
            if time.monotonic() >= deadline:
                raise


def _limited(seconds: float) -> float:
    return min(max(seconds, 1e-3), LONGEST_REQUEST)


def _key(key: str) -> bytes:
    return KEY + key.encode()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
