"""Who the workers are: names, ids and addresses, and which incarnation of each is meant."""

import re
import threading
from collections.abc import Callable, Iterable

import msgspec

from telegrad.errors import InvalidName, UnknownWorker
from telegrad.ids import MAX_WORKER_ID, Incarnation, PeerId, WorkerId, generation_of, peer_id
from telegrad.transport.addresses import Address

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")


class WorkerInfo:
    """A worker as users see it: its name and its id (its rank, where ranks were given).

    Examples:
        >>> rpc.get_worker_info("worker1")
        WorkerInfo(id=1, name=worker1)
    """

    __slots__ = ("id", "name")

    def __init__(self, name: str, id: int) -> None:
        check_name(name)
        self.name = name
        self.id = WorkerId(id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and (self.id, self.name) == (other.id, other.name)

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    def __reduce__(self) -> tuple[object, ...]:
        return WorkerInfo, (self.name, int(self.id))


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One incarnation of a worker, as published to the others."""

    name: str
    worker_id: WorkerId
    incarnation: Incarnation
    addresses: tuple[Address, ...]
    pid: int
    leaving: bool = False
    device_maps: dict[str, dict[str, str]] = {}  # where its tensors go on other workers, by their names
    host: str = ""  # the identity of its host: equal to ours where its process can be looked up
    secret: bytes = b""  # what to prove to it, in an insecure job: whoever can read this record may call it
    relayed: bool = False  # repeated by another worker, and not to be trusted over what a worker says of itself
    gpus: tuple[str, ...] = ()  # the UUIDs of the GPUs it sees, in its own order
    devices: tuple[str, ...] = ()  # the devices it was told to use, if it was
    certificate: bytes = b""  # fingerprint of the one it shows on TCP; empty if it speaks no TLS
    ending: str = ""  # in words, if it leaves because its program ended without a shutdown

    def __repr__(self) -> str:
        return f"<Member {self.name!r}: id {self.worker_id}, incarnation {self.incarnation:x}>"

    @property
    def info(self) -> WorkerInfo:
        """What users see of it."""
        return WorkerInfo(self.name, self.worker_id)

    @property
    def generation(self) -> int:
        """How many workers with its id were started before."""
        return generation_of(self.incarnation)


def peer_of(member: Member) -> PeerId:
    """The peer that an incarnation of a worker is: what its ids begin with."""
    return peer_id(member.worker_id, generation_of(member.incarnation))


def check_name(name: str) -> None:
    """Raise InvalidName, which is a ValueError and a RuntimeError, unless `name` can name a worker."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName(
            "Worker name must match ^[A-Za-z0-9-_:]*$, must be non-empty and must be shorter than 128 characters, "
            f"got {name!r}"
        )


def check_id(worker_id: int) -> None:
    """Raise ValueError unless `worker_id` fits into the top 16 bits of an id."""
    if not 0 <= worker_id <= MAX_WORKER_ID:
        raise ValueError(f"worker id {worker_id} is not within 0..{MAX_WORKER_ID}")


class Directory:
    """The members this worker knows of, by id and by name. The latest incarnation of a name or id counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[int, Member] = {}
        self._by_name: dict[str, Member] = {}
        self._ids: dict[int, WorkerId] = {}  # by incarnation
        self._latest: dict[WorkerId, Incarnation] = {}  # of each id, whether it is still there or not
        self._left: dict[str | int, Member] = {}  # those who left on purpose, by name and by id
        self._endings: dict[Incarnation, str] = {}  # of those whose program ended without a shutdown
        # In a large job, the record of a worker that is not known here yet; called without locks that others wait for.
        self.look_up: Callable[[int], Member | None] | None = None
        self.counted_here = 0  # workers on this host, where they were counted as all came

    def update(self, members: Iterable[Member]) -> list[Member]:
        """Take in what was published; those that were replaced by a newer incarnation, or that left."""
        gone: list[Member] = []
        with self._lock:
            for member in members:
                known = self._by_id.get(member.worker_id)
                if member.leaving:
                    if known is not None and known.incarnation == member.incarnation:
                        self._drop(known)
                        if member.ending:
                            self._endings[member.incarnation] = member.ending
                        self._left[known.name] = self._left[int(known.worker_id)] = known
                        gone.append(known)
                elif not self._is_old_news(member):
                    gone += self._enter(member)
        return gone

    def _is_old_news(self, member: Member) -> bool:
        """Whether a record says less than is known. Those of a store that was opened again come in any order."""
        latest = self._latest.get(member.worker_id)
        if latest == member.incarnation:
            return self.has_left(member)
        if latest is not None and generation_of(latest) >= generation_of(member.incarnation):
            return True
        return member.relayed and member.name in self._by_name

    def _enter(self, member: Member) -> list[Member]:
        """Take in a member; those it replaces."""
        before = (self._by_id.get(member.worker_id), self._by_name.get(member.name))
        gone = list(
            {m.incarnation: m for m in before if m is not None and m.incarnation != member.incarnation}.values()
        )
        for each in gone:
            self._drop(each)
        self._by_id[member.worker_id] = member
        self._by_name[member.name] = member
        self._ids[member.incarnation] = member.worker_id
        self._latest[member.worker_id] = member.incarnation
        return gone

    def latest(self) -> dict[WorkerId, Incarnation]:
        """Of each id that was ever given, the incarnation that was started last."""
        with self._lock:
            return dict(self._latest)

    def _drop(self, member: Member) -> None:
        self._by_id.pop(member.worker_id, None)
        self._ids.pop(member.incarnation, None)
        if self._by_name.get(member.name) is member:
            del self._by_name[member.name]

    def by_name(self, name: str) -> Member | None:
        """The member of that name."""
        return self._by_name.get(name)

    def known(self, worker_id: int) -> Member | None:
        """The member with that id, if its record was read."""
        return self._by_id.get(worker_id)

    def by_id(self, worker_id: int) -> Member | None:
        """The member with that id."""
        member = self._by_id.get(worker_id)
        return member if member is not None or self.look_up is None else self._looked_up(worker_id)

    def _looked_up(self, worker_id: int) -> Member | None:
        assert self.look_up is not None
        member = self.look_up(worker_id)
        with self._lock:
            if member is not None and member.name not in self._by_name and not self._is_old_news(member):
                self._enter(member)  # in nobody's place, so nobody has to be told
        return member

    def holder_of(self, incarnation: int) -> WorkerId | None:
        """The id of the member that this incarnation is."""
        return self._ids.get(incarnation)

    def has_left(self, member: Member) -> bool:
        """Whether this incarnation said that it leaves."""
        left = self._left.get(int(member.worker_id))
        return left is not None and left.incarnation == member.incarnation

    def ending_of(self, member: Member) -> str:
        """How the program of this incarnation ended, if it left because of that and without a shutdown."""
        return self._endings.get(member.incarnation, "")

    def who_left(self, who: str | int) -> Member | None:
        """The member of that name or id that was here and left."""
        return self._left.get(who)

    def names_ever(self) -> set[str]:
        """The names of those who are here and of those who left."""
        with self._lock:
            return set(self._by_name) | {name for name in self._left if isinstance(name, str)}

    def members(self) -> list[Member]:
        """All, by id."""
        with self._lock:
            return [self._by_id[i] for i in sorted(self._by_id)]

    def workers_here(self, mine: Member) -> int:
        """How many processes on the host of `mine` are workers of this job, that one included."""
        return self.counted_here or len(
            {member.pid for member in self.members() if member.host == mine.host} | {mine.pid}
        )

    def unknown(self, who: object) -> UnknownWorker:
        """The error for a worker that is not there."""
        known = ", ".join(f"{m.name} ({m.worker_id})" for m in self.members())
        return UnknownWorker(f"could not find destination worker {who!r}; the workers of this job are: {known}")
