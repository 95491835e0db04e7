"""Where workers meet: a log of who joined and who left, kept in one of torch's stores.

Each worker appends a record of itself and reads the records of the others. The log only grows, so a reader needs to
remember no more than how far it has read, and a worker that comes back under its old name is simply a later record.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import msgspec
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from telegrad.errors import RendezvousError, TelegradError
from telegrad.rpc.workers import Member

log = logging.getLogger("telegrad.rpc")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Member).decode


def open_store(init_method: str, rank: int, world_size: int | None, timeout: float) -> Any:
    """The store that `init_method` names, through torch's own rendezvous."""
    limit = timedelta(seconds=max(timeout, 1e-3))
    try:
        if world_size:
            store, _, _ = next(iter(rendezvous(init_method, rank=rank, world_size=world_size, timeout=limit)))
        else:
            store = _open_shared_store(init_method, rank, limit)
    except (ValueError, TypeError) as error:
        raise RendezvousError(f"cannot meet at {init_method!r}: {error}") from error
    except RuntimeError as error:  # torch's store errors are RuntimeErrors
        raise RendezvousError(
            f"cannot meet at {init_method!r} within {timeout:g} s: {str(error).splitlines()[0]}. "
            "For tcp:// and env:// rank 0 opens the meeting place: is it running, and is the address right?"
        ) from error
    store.set_timeout(limit)
    return store


def _open_shared_store(init_method: str, rank: int, limit: timedelta) -> Any:
    """A store for a job whose size nobody knows: whoever comes first opens it."""
    url = urlparse(init_method)
    if url.scheme == "file":
        return FileStore(url.path, -1)
    if url.scheme == "env":
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            raise ValueError("env:// needs MASTER_ADDR and MASTER_PORT in the environment") from error
    elif url.scheme == "tcp" and url.hostname and url.port:
        host, port = url.hostname, url.port
    else:
        raise ValueError("it must be env://, tcp://host:port or file:///path")
    if rank <= 0:
        with contextlib.suppress(RuntimeError):  # somebody else opened it first
            return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


class MeetingPlace:
    """The log of one job in a store."""

    def __init__(self, store: Any, prefix: str) -> None:
        """`prefix` says which kind of job it is; there is one kind in one store."""
        kind = PrefixStore("telegrad", store).compare_set("kind", "", prefix).decode()
        if kind != prefix:
            raise RendezvousError(
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                f"The workers that meet here began a job of the {kind} kind; give `world_size` on all or on none"
            )
        self.store = store
        self._store = PrefixStore(f"telegrad/{prefix}", store)
        self._lock = threading.RLock()
        self._read = 0

    def agree_on_secret(self) -> bytes:
        """A secret for the job: the first worker's proposal counts for all."""
        proposal = os.urandom(32).hex()
        return bytes(self._store.compare_set("secret", "", proposal))

    def next_id(self) -> int:
        """An id for a worker that came without a rank."""
        return int(self._store.add("ids", 1)) - 1

    def next_generation(self, worker_id: int) -> int:
        """How many workers with this id were started here before."""
        return int(self._store.add(f"generation/{worker_id}", 1)) - 1

    def publish(self, member: Member) -> None:
        """Append a record."""
        index = int(self._store.add("records", 1)) - 1
        self._store.set(f"record/{index}", _encode(member))  # type: ignore[arg-type]  # bytes are fine, the stub is not

    def news(self, take: Callable[[list[Member]], None]) -> None:
        """Give the records appended since the last time to `take`. Whoever asks next finds them taken."""
        with self._lock:
            fresh = []
            while self._store.check([f"record/{self._read}"]):
                fresh.append(_decode(self._store.get(f"record/{self._read}")))
                self._read += 1
            if fresh:
                take(fresh)


def wait_for_ranks(
    place: MeetingPlace,
    take: Callable[[list[Member]], None],
    present: Callable[[], set[int]],
    world_size: int,
    seconds: float,
) -> None:
    """Read records until all ranks are there. RendezvousError names those that are missing at the deadline."""
    # By looking again and again, ever less often: a wait inside torch's stores would print when it times out.
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while True:
        missing = sorted(set(range(world_size)) - present())
        if not missing:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"rendezvous timed out after {seconds:g} s: of {world_size} workers, ranks {missing} did not come. "
                "Start them, or raise `rendezvous_timeout`"
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            place.news(take)
        except TelegradError:
            raise
        except RuntimeError as error:
            raise RendezvousError(
                f"the meeting place closed while waiting for ranks {missing}: {str(error).splitlines()[0]}"
            ) from error
