"""A file of values that several processes write, each of which may be killed in the middle of it.

It is in the format of torch's FileStore, a log of records: the length of a key, the key, the length of a value, the
value. Whoever is killed while it appends leaves the beginning of a record at the end. torch's FileStore reads on there
for ever, with the file locked. Here such an end is left unread, and the next to write, who has the lock and therefore
knows that its writer is gone, cuts it off. Waiting for the lock has a deadline: a process may be stopped that holds it.

The format, the locks and the count of users are torch's, so that a process group may be given the same path: torch's
own tests do that, and torch would hang in a file of another format. Its keys begin with "/", or with "-/" where one is
removed; those of the count have neither, and the first record of every file is one of them.

The file is opened for each operation, which is what makes news of other hosts visible on NFS, and gives a forked child
locks of its own. One operation at a time, by any thread; a lock orders them.
"""

import contextlib
import fcntl
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator

from telegrad.errors import RendezvousError
from telegrad.rpc.job.rendezvous.store_client import StoreClosed

_LENGTH = struct.Struct("=I")
_USERS, _ENDED = b"refcount/", b"cleanup/"  # how many have the file open, and how many have closed it
_BEGINNING = _LENGTH.pack(len(_USERS)) + _USERS
KEY, _REMOVED = b"/", b"-"  # before each key
LONGEST_REQUEST = 10.0  # seconds; whoever asks a store may have better things to do
_CLOSING_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01


class Replaced(StoreClosed):
    """Somebody has removed the file, or put another in its place."""


class RecordFile:
    """The file at `path` as a log of values, and what was read of it. Begins with nothing read."""

    def __init__(self, path: str) -> None:
        self.path, self.seconds = path, LONGEST_REQUEST
        self._lock = threading.Lock()
        # Held open and never used: while it is, the file's number is given to no other.
        self._kept = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._number = _number(os.fstat(self._kept))
        self._forget()

    def _forget(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._end = 0  # of the complete records that were read
        self._pid = os.getpid()

    def values(self) -> dict[bytes, bytes]:
        """All values by key, as they are now. Locks the file only if it has grown."""
        self._notice_fork()
        with self._lock, self._opened() as fd:
            if self._size(fd) != self._end:
                self._lock_file(fd, fcntl.LOCK_SH)
                self._read(fd)
            return self._values

    def change(self, key: bytes, decide: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Give the value of a key to `decide` and write what it returns, None to remove it, before anybody else."""
        self._notice_fork()
        with self._lock, self._writing() as fd:
            old = self._values.get(key)
            new = decide(old)
            if new is None and old is not None:
                self._append(fd, _REMOVED + key, b"")
            elif new is not None and new != old:
                self._append(fd, key, new)
            return new

    def enter(self) -> None:
        """Count this user. Replaced if the last of the others has just removed the file."""
        try:
            with self._lock, self._writing() as fd:
                self._add(fd, _USERS, 1)
        except BaseException:
            os.close(self._kept)
            raise

    def close(self, workers: int, pid: int) -> None:
        """This user goes; the last of so many `workers` removes the file. -1: they come and go, and it stays."""
        self.seconds = min(self.seconds, _CLOSING_SECONDS)
        try:
            if pid == os.getpid():  # a forked child was not counted
                with contextlib.suppress(RuntimeError, ValueError), self._lock, self._writing() as fd:
                    ended, users = self._add(fd, _ENDED, 1), self._add(fd, _USERS, -1)
                    if users == 0 and ended >= workers >= 0:
                        os.unlink(self.path)
        finally:
            os.close(self._kept)

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():  # another thread of the parent may have held the lock, in the middle of reading
            self._lock = threading.Lock()
            self._forget()

    # --- the file, with `_lock` held ---

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                yield fd
            finally:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has this descriptor, too
                os.close(fd)
        except FileNotFoundError:
            raise self._replaced() from None
        except OSError as error:
            raise StoreClosed(f"the rendezvous store {self.path!r} cannot be used: {error}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        """The file, locked for this process alone and read to its end, which is that of a complete record."""
        with self._opened() as fd:
            self._lock_file(fd, fcntl.LOCK_EX)
            self._read(fd)
            if self._size(fd) > self._end:
                os.ftruncate(fd, self._end)
            yield fd

    def _size(self, fd: int) -> int:
        found = os.fstat(fd)
        if _number(found) != self._number or found.st_nlink == 0 or found.st_size < self._end:
            raise self._replaced()
        return found.st_size

    def _replaced(self) -> Replaced:
        return Replaced(
            f"the rendezvous store {self.path!r} was removed or replaced while this worker used it: those who come now "
            "do not find it. Remove such a file before the first worker of a job starts, or after the last has ended"
        )

    def _lock_file(self, fd: int, how: int) -> None:
        deadline, pause = time.monotonic() + self.seconds, _FIRST_PAUSE
        while True:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreClosed(
                        f"the rendezvous store {self.path!r} has been locked for {self.seconds:g} s by {_holders(fd)}. "
                        "Is it stopped (Ctrl-Z, a debugger)? Let it go on, or end it"
                    ) from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _read(self, fd: int) -> None:
        """Take in the complete records that were not read yet."""
        size = self._size(fd)
        data = b""
        while more := os.pread(fd, size - self._end - len(data), self._end + len(data)):
            data += more
        if self._end == 0 and data[: len(_BEGINNING)] != _BEGINNING[: len(data)]:
            raise RendezvousError(
                f"cannot meet at {self.path!r}: the file is no store, it begins with {data[:16]!r}. It was left as it "
                "is. Give the job the path of a file that does not exist yet; or remove this one, if nobody needs it"
            )
        start = 0
        while (record := _record_at(data, start)) is not None:
            key, value, start = record
            if key.startswith(_REMOVED):
                self._values.pop(key[1:], None)
            else:
                self._values[key] = value
        self._end += start

    def _append(self, fd: int, key: bytes, value: bytes) -> None:
        data = memoryview(_LENGTH.pack(len(key)) + key + _LENGTH.pack(len(value)) + value)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(fd, data[written:], self._end + written)
        except BaseException:  # the disk is full, or somebody pressed Ctrl-C
            os.ftruncate(fd, self._end)
            raise
        self._read(fd)

    def _add(self, fd: int, key: bytes, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._append(fd, key, str(total).encode())
        return total


def _record_at(data: bytes, start: int) -> tuple[bytes, bytes, int] | None:
    """Key and value of the record at `start`, and where it ends; None if it is not all there."""
    parts = []
    for _ in range(2):
        first = start + _LENGTH.size
        if first > len(data):
            return None
        start = first + _LENGTH.unpack_from(data, start)[0]
        if start > len(data):
            return None
        parts.append(data[first:start])
    return parts[0], parts[1], start


def _number(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _holders(fd: int) -> str:
    """Who has a file locked, in words, as far as this host knows."""
    device, inode = _number(os.fstat(fd))
    place, pids = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}", set()
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == place:  # one that waits has an arrow there
                pids.add(fields[4])
    return f"process {', '.join(sorted(pids))}" if pids else "another process, perhaps on another host"
