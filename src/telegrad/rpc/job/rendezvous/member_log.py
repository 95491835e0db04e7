"""Where workers meet: a log of who joined and who left, kept in one of torch's stores.

Each worker appends a record of itself and reads the records of the others. The log only grows, so a reader needs to
remember no more than how far it has read, and a worker that comes back under its old name is simply a later record.
In a large job it is read by those who ask for all members; the others look into a register (`register.py`).

A store that lives in the process of one worker ends with it. The log is then lost until `move` gives it another
store, at the same address, which begins empty: see `store_recovery.py`.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlparse

import msgspec
from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import rendezvous

from telegrad.errors import RendezvousError
from telegrad.ids import Incarnation, WorkerId, generation_of
from telegrad.rpc.job.rendezvous import job_marker
from telegrad.rpc.job.rendezvous import store as store_host
from telegrad.rpc.job.rendezvous.file_store import FileStore
from telegrad.rpc.job.rendezvous.job_marker import JobMarker
from telegrad.rpc.job.rendezvous.register import Register, is_large
from telegrad.rpc.job.rendezvous.store_client import Prefixed, StoreClosed
from telegrad.rpc.trust.files import make_private
from telegrad.rpc.trust.rate import LimitedLog
from telegrad.rpc.trust.seal import UNSEALED, Seal, new_job
from telegrad.rpc.workers import Member, check_id, check_name

log = logging.getLogger("telegrad.rpc")
_warnings = LimitedLog(log)

# Whoever opens a store writes the job's marker into it at once. One that has none for so long is not ours.
_MARKER_SECONDS, _LOOK_SECONDS = 5.0, 0.05
_SETTLING_SECONDS = 2.0  # for all workers to come to a store that was opened anew
# Numbers that are announced and not written yet. Whoever can write to a store can announce as many as he likes; more
# than so many workers of a job are never about to write at a time.
_MOST_UNWRITTEN = 4096
_LONGEST_COMPLAINT = 1000
_WHAT_IT_MUST_BE = "it must be env://, tcp://host:port or file:///path"
NAMESPACE_KEY = "namespace"  # of the part of a launcher's store that counts now, for those who look from outside

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Member).decode


def open_store(init_method: str, rank: int, world_size: int | None, timeout: float) -> Any:
    """The store that `init_method` names. Others than file:// and the plain forms of tcp:// and env:// are left to
    torch."""
    limit = timedelta(seconds=max(timeout, 1e-3))
    endpoint = store_host.endpoint_in(init_method)
    if endpoint is None and init_method.rstrip("/") == "env:":
        if world_size == 1 and not store_host.names_a_place():
            return HashStore()  # nobody to meet
        raise RendezvousError(
            "where the workers meet is in MASTER_ADDR and MASTER_PORT, which are not set, or not to a host and a "
            "number. Start the workers by `telegrad run` or torchrun, which set them; or set them on all workers to "
            "the address of rank 0 and a port that is free there; or give an `init_method` in the options. On one "
            "machine `telegrad.local_cluster()` needs none of this"
        )
    if init_method.startswith("file:"):
        return _file_store(init_method, -1 if world_size is None else world_size, timeout)
    try:
        if endpoint is not None:
            first = rank == 0 or (world_size is None and rank < 0 and store_host.is_here(endpoint[0]))
            opens = first and not store_host.is_launchers(endpoint)
            store: Any = store_host.open_or_join(endpoint, opens=opens, seconds=timeout)
        elif world_size:
            store, _, _ = next(iter(rendezvous(init_method, rank=rank, world_size=world_size, timeout=limit)))
        else:
            raise ValueError(_WHAT_IT_MUST_BE)
    except TimeoutError as error:
        raise RendezvousError(
            f"cannot meet at {init_method!r} within {timeout:g} s: {error}. For tcp:// and env:// rank 0 opens the "
            "rendezvous store: is it running, and is the address right?"
        ) from error
    except (ValueError, TypeError) as error:
        raise RendezvousError(f"cannot meet at {init_method!r}: {error}") from error
    except RuntimeError as error:  # torch's store errors are RuntimeErrors
        if str(error).startswith("No rendezvous handler"):
            raise RendezvousError(f"cannot meet at {init_method!r}: {_WHAT_IT_MUST_BE}") from None
        raise RendezvousError(
            f"cannot meet at {init_method!r} within {timeout:g} s: {str(error).splitlines()[0]}. "
            "For tcp:// and env:// rank 0 opens the rendezvous store: is it running, and is the address right?"
        ) from error
    store.set_timeout(limit)
    return store


def _file_store(init_method: str, workers: int, timeout: float) -> FileStore:
    path = urlparse(init_method).path
    if not path:
        raise RendezvousError(f"cannot meet at {init_method!r}: the path of a file is missing, as in file:///path")
    make_private(path)
    try:
        return FileStore(path, workers, timeout)
    except (StoreClosed, ValueError) as error:  # the latter: its count of users is no number
        raise RendezvousError(f"cannot meet at {init_method!r}: {error}") from error


class MemberLog:
    """The log of one job in a store."""

    def __init__(self, store: Any, marker: JobMarker, seal: Seal = UNSEALED) -> None:
        """`marker` says which job it is: there is one in one store. RendezvousError if another has begun there. Records
        have the `seal` of the job: those that have not are not read."""
        self._seal = seal
        self._job = b""  # its number, which its records carry
        self.where = store_host.worker_endpoint_of(store)  # None for a store that does not end with a worker
        self.address = store_host.endpoint_of(store)  # None for one that is not reached over the network
        # Whether the store is still there. Asked before each use.
        self.stands: Callable[[], bool] = lambda: True
        self._marker = marker
        self._lock = threading.RLock()
        self._complaints_read = 0
        self._forget_reading()
        self.register: Register | None = None  # of a large job
        self.reads_all = not is_large(marker.world_size)  # a large job's log is read when all of it is asked for
        self.has_met = False  # all workers of a job of fixed size have come
        self.store: Any = None
        self._log: Any = None
        self.move(store)

    def move(self, store: Any, say_again: Callable[[], None] = lambda: None) -> None:
        """Use this store from now on. Nobody here reads in it before `say_again` has said what others look for."""
        ours = Prefixed(store_host.namespace(store), store)
        self._check_job(ours, store)
        with self._lock:
            self.store, self._ours = store, ours
            self._log = Prefixed(f"{store_host.namespace(store)}/{self._marker.kind}", store)
            if is_large(size := self._marker.world_size):
                self.register = Register(self._log, size or 0, self._decoded)
            self._forget_reading()
            self._complaints_read = 0
            self._moved = time.monotonic() if self.has_met else 0.0
            self.is_first = int(self._log.add("visits", 1)) == 1
            if self.is_first and (part := store_host.namespace(store)) != "telegrad":
                Prefixed("telegrad", store).set(NAMESPACE_KEY, part)
            say_again()

    def _check_job(self, ours: Prefixed, store: Any) -> None:
        """Begin the job in this store, or see that it is the one that has begun there."""
        where = store_host.describe(store)
        if store_host.may_begin(store):
            mark = ours.compare_set("mark", "", self._seal.mark(self._job or new_job()))
        else:
            self._await_job(ours, where)
            mark = ours.get("mark")
        number = self._seal.job_in(mark)
        if number is None:
            raise RendezvousError(
                "the store where this worker should meet others is that of a job with another secret, or of somebody "
                "who knows none; it was not joined. Give all workers of a job the same secret (TELEGRAD_SECRET), and "
                "each job a store of its own"
            )
        self._job = number
        found = ours.compare_set("job", "", job_marker.encode(self._marker))
        problem = job_marker.difference(job_marker.decode(found, where), self._marker, where)
        if problem:
            index = ours.add("complaints", 1) - 1  # those of the other opinion wait for this worker: let them know
            ours.set(f"complaint/{index}", self._seal.seal(self._job, problem.encode()[:_LONGEST_COMPLAINT]))
            raise RendezvousError(problem)

    def _await_job(self, ours: Prefixed, where: str) -> None:
        """Whoever opened this store has begun the job there, or is about to; if not, it is a stranger's."""
        deadline = time.monotonic() + _MARKER_SECONDS
        while not ours.check("mark"):
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"{where} is a store of torch's in which no job of Telegrad has begun: it belongs to another "
                    "program. Give this job another port"
                )
            time.sleep(_LOOK_SECONDS)

    @property
    def is_settling(self) -> bool:
        """Whether the records of a large job may be incomplete: its store is lost, or has just been opened anew."""
        lost = self._log is None or not self.stands() or time.monotonic() - self._moved < _SETTLING_SECONDS
        return self.has_met and not self.reads_all and lost

    def complaints(self) -> list[str]:
        """What was said to workers that were turned away, since the last time this was asked."""
        with self._lock:
            if self._log is None or not self.stands():
                return []
            first, self._complaints_read = self._complaints_read, self._ours.add("complaints", 0)
            keys = [f"complaint/{index}" for index in _announced(first, self._complaints_read)]
            found = [self._seal.open(self._ours.get(key)) for key in keys if self._ours.check(key)]
            return [one.record.decode("utf-8", "replace") for one in found if one is not None and one.job == self._job]

    def end_job(self) -> None:
        """All leave: the next job that meets in this store may be another."""
        with self._lock:
            if self._log is not None and self.stands():
                for key in ("job", "mark"):
                    self._ours.delete_key(key)

    def lose(self) -> None:
        """The store has ended: nothing more is asked of it, and no news come, until there is another."""
        with self._lock:
            self.store = self._log = None

    def read_again(self) -> None:
        """Give all records to the next reader, as to one who has just come."""
        with self._lock:
            self._forget_reading()

    def _forget_reading(self) -> None:
        self._read = 0
        self._unwritten: list[int] = []  # announced and not there yet: their writer is slow, or died just then

    def _open_log(self) -> Any:
        log_ = self._log
        if log_ is None or not self.stands():
            raise RuntimeError("the worker that kept the rendezvous store has gone, and no other has opened it yet")
        return log_

    def next_id(self) -> int:
        """An id for a worker that came without a rank."""
        return int(self._open_log().add("ids", 1)) - 1

    def next_generation(self, worker_id: int) -> int:
        """How many workers with this id were started before."""
        drawn = int(self._open_log().add(f"generation/{worker_id}", 1)) - 1
        latest = self._latest(worker_id)
        behind = 0 if latest is None else generation_of(latest) + 1 - drawn
        if behind <= 0:
            return drawn
        return int(self._open_log().add(f"generation/{worker_id}", behind)) - 1

    def is_outdated(self, worker_id: int, incarnation: Incarnation) -> bool:
        """Whether others know of one with this id that was started later, or so it looks: see `restore`."""
        latest = self._latest(worker_id)
        return latest not in (None, incarnation) and generation_of(latest) >= generation_of(incarnation)

    def _latest(self, worker_id: int) -> Incarnation | None:
        """Of the workers with this id that were known before the store was opened anew, the one started last."""
        key = f"latest/{worker_id}"
        return Incarnation(int(self._open_log().get(key))) if self._open_log().check(key) else None

    def restore(self, latest: Mapping[WorkerId, Incarnation]) -> None:
        """In a store opened anew: say which ids have been given, and who had them last.

        One of them may have opened the store, and have counted itself the first with its id."""
        for worker_id, incarnation in latest.items():
            key, known = f"latest/{worker_id}", self._latest(worker_id)
            while known is None or generation_of(known) < generation_of(incarnation):
                expected = "" if known is None else str(known)
                known = Incarnation(int(self._open_log().compare_set(key, expected, str(incarnation))))
        missing = max(latest) + 1 - int(self._open_log().add("ids", 0))
        if missing > 0:
            self._open_log().add("ids", missing)

    def publish(self, member: Member) -> bool:
        """Append a record; False if another worker has its name, as far as a register knows. In a large job the record
        of another worker, which is `relayed`, is left out if somebody has repeated it already."""
        sealed = self._seal.seal(self._job, _encode(member))
        if member.relayed and self.register is not None and not self.register.enter_relayed(member, sealed):
            return True
        index = int(self._open_log().add("records", 1)) - 1
        self._open_log().set(f"record/{index}", sealed)
        return self.register is None or member.relayed or self.register.enter(member, sealed)

    def say_last(self, member: Member) -> None:
        """The store may end with this worker: tell those who monitor it what they could not read there any more."""
        store_host.say_last(self.store, self._seal.seal(self._job, _encode(member)))

    def read_last(self, monitor: socket.socket) -> list[Member]:
        """What a store that has just ended said last through a connection that monitored it."""
        sealed = store_host.last_record(monitor)
        return _as_in_log(self._decoded(sealed)) if sealed else []

    def news(self, take: Callable[[list[Member]], None], about: str | int | None = None) -> None:
        """Give the records appended since the last time to `take`. Whoever asks next finds them taken.

        Who asks `about` one worker, by name or id, needs no others: in a large job they are left unread."""
        with self._lock:
            fresh = self._fresh() if self.reads_all or about is None else self._fresh_of(about)
            if fresh:
                take(fresh)
            if about is None and self._read:
                self.reads_all = True  # last: who finds this set knows of all

    def _fresh_of(self, who: str | int) -> list[Member]:
        return _as_in_log(self.asked(lambda register: register.records_of(who)) or [])

    def look_up(self, worker_id: int) -> Member | None:
        """The record of a worker of a large job, unless it has left. Holds no lock but that of the store."""
        member = None if self.reads_all else self.asked(lambda register: register.record_of(worker_id))
        return None if member is None or member.leaving else member

    def asked(self, question: Callable[[Register], T]) -> T | None:
        """What the register says; None while there is none."""
        try:
            if self.register is not None and self._log is not None and self.stands():
                return question(self.register)
        except RuntimeError as error:
            if self.where is None:
                raise
            log.debug("the rendezvous store has closed, and is opened anew: %s", error)
        return None

    def _fresh(self) -> list[Member]:
        fresh: list[Member] = []
        try:
            if self._log is not None and self.stands():
                end = int(self._log.add("records", 0))
                self._unwritten += _announced(self._read, end, self._marker.world_size or 0)
                self._read = end
                fresh, unwritten = self._read_all(self._unwritten)
                self._unwritten = unwritten[-_MOST_UNWRITTEN:]
        except RuntimeError as error:
            if self.where is None:
                raise
            log.debug("the rendezvous store has closed, and is opened anew: %s", error)
        return fresh

    def _read_all(self, indexes: list[int]) -> tuple[list[Member], list[int]]:
        """The records that are there, and which are not. In few requests: all workers of a job read the records of all,
        so one request for each would be the square of their number."""
        if not indexes:
            return [], []
        records = self._log.get_all([f"record/{index}" for index in indexes])
        if records is not None:
            return [member for record in records for member in self._decoded(record)], []
        if len(indexes) == 1:
            return [], indexes
        middle = len(indexes) // 2
        found, unwritten = self._read_all(indexes[:middle])
        more, also_unwritten = self._read_all(indexes[middle:])
        return found + more, unwritten + also_unwritten

    def _decoded(self, sealed: bytes) -> list[Member]:
        opened = self._seal.open(sealed)
        try:
            if opened is not None:
                # Of another job: it was here before, or somebody kept its records.
                return [_member_in(opened.record)] if opened.job == self._job else []
            problem = "it was not written by a worker of this job"
        except (msgspec.DecodeError, ValueError) as error:  # the latter: a name or an id that no worker can have
            problem = f"it is malformed: {error}"
        _warnings.warning("a record in the rendezvous store was ignored: %s", problem)
        return []


def _as_in_log(records: list[Member]) -> list[Member]:
    """Last records of workers as the log has them: first that one has come, then that it has left."""
    came = [msgspec.structs.replace(member, leaving=False, ending="") for member in records if member.leaving]
    return came + records


def read_records(log_: Prefixed, seal: Seal) -> list[Member]:
    """All records of a log, for one who is no worker: a launcher that wants to know what its workers said."""
    keys = [f"record/{index}" for index in _announced(0, log_.add("records", 0))]
    records = [seal.open(log_.get(key)) for key in keys if log_.check(key)]
    return [_member_in(opened.record) for opened in records if opened is not None]


def _member_in(record: bytes) -> Member:
    member = _decode(record)
    check_name(member.name)
    check_id(member.worker_id)
    return member


def _announced(first: int, end: int, workers: int = 0) -> list[int]:
    """The numbers from `first` up to `end`. Of more than a job has workers, the first and the last: what is between
    was announced by a stranger, who keeps nobody from finding the others."""
    most = max(_MOST_UNWRITTEN, workers)
    if end - first <= 2 * most:
        return list(range(first, end))
    return [*range(first, first + most), *range(end - most, end)]
