"""`core.py` decides when a run's snapshot is committed, and what to return to after a death. It sends nothing.

    RUNNING --step ended--> COPYING --all copied--> RUNNING          parts travel to their holders meanwhile;
                                                                     when all have arrived, the snapshot is committed
    any --somebody died--> WAITING --all are back--> GATHERING --all reported--> RESTORING --all restored--> RUNNING

A run begins like a return: everybody is asked what they have. The newest snapshot of which every member's part is
found, with its owner, with a holder or on disk, is the one to return to; if nobody has any, the run is new, and its
first snapshot is taken before its first step. So a driver that was started again needs to be told nothing.

At every moment the members hold all parts of a snapshot that was committed, or of a newer one, as long as of each owner
and its holders one lives. The order of messages does not matter: each answer names the epoch or the snapshot it is for.
"""

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from telegrad.durable.snapshot.names import Report, Snapshot

DISK = ""  # where a part comes from, if not from a worker


class Halt(NamedTuple):
    """Have a member stop, and say what it has."""

    member: str
    epoch: int


class Take(NamedTuple):
    """Have a member copy its state aside and send it to its holders; or to disk."""

    member: str
    epoch: int
    snapshot: Snapshot
    holders: tuple[str, ...]
    write: bool


class Restore(NamedTuple):
    """Have a member return to a snapshot, and send its part to those of its holders that lack it."""

    member: str
    epoch: int
    snapshot: Snapshot
    source: str | None  # a worker that keeps its part, or DISK; None if it has that itself
    holders: tuple[str, ...]


class Commit(NamedTuple):
    """Have a member forget what is older."""

    member: str
    epoch: int
    snapshot: Snapshot


class Seal(NamedTuple):
    """All parts are on disk: say so there."""

    snapshot: Snapshot


class Resume(NamedTuple):
    """The loop goes on, after so many steps."""

    step: int


class Lost(NamedTuple):
    """No copy of the parts of these members is left; the run has to end. `started`: whether there was any snapshot."""

    members: tuple[str, ...]
    started: bool


Action = Halt | Take | Restore | Commit | Seal | Resume | Lost


class Phase(enum.Enum):
    """What the driver is doing."""

    RUNNING = "running"
    COPYING = "copying"
    SETTLING = "waiting for the last snapshot to be safe"
    WAITING = "waiting for a lost worker"
    GATHERING = "asking what there is"
    RESTORING = "restoring"
    ENDED = "ended"


class Coordinator:
    """The driver's view of its run. Every event returns what is to be done."""

    def __init__(
        self,
        members: Sequence[str],
        copies: int,
        epochs: Iterator[int],
        driver: int = 0,
        sealed: Collection[Snapshot] = (),
    ) -> None:
        self.members = tuple(members)
        self.holders = ring(self.members, copies)
        self.phase = Phase.WAITING
        self.epoch = 0
        self.step = 0
        self.committed: Snapshot | None = None
        self.missing: set[str] = set()
        self._epochs = epochs
        self._driver = driver
        self._sealed = set(sealed)
        self._awaited: set[str] = set()  # members that the present phase waits for
        self._reports: dict[str, Report] = {}
        self._lost_any = False  # before there was a first snapshot
        self._target: Snapshot | None = None  # being restored
        self._pending: Snapshot | None = None  # taken, not committed
        self._unsafe: set[str] = set()  # members whose part of it has not arrived
        self._writing: Snapshot | None = None
        self._unwritten: set[str] = set()
        self._due = self._due_on_disk = False
        self._final: bool | None = None  # a last snapshot is due once the present one is safe; whether to disk

    def __repr__(self) -> str:
        missing = f", without {', '.join(sorted(self.missing))}" if self.missing else ""
        return f"<Coordinator: {self.phase.value} after step {self.step}, committed {self.committed}{missing}>"

    # --- beginning and returning ---

    def start(self) -> list[Action]:
        """All values have been declared; or a step failed for a reason of its own, and is to be undone."""
        return self._gather() if not self.missing else []

    def died(self, member: str) -> list[Action]:
        """A member is gone, whatever it was asked: nothing goes on without it."""
        if self.phase is not Phase.ENDED:
            self.missing.add(member)
            self.phase = Phase.WAITING
            self._forget_plans()
            self._lost_any = True
        return []

    def _forget_plans(self) -> None:
        """Nothing comes of the snapshots that were being taken."""
        self._pending = self._writing = self._final = None
        self._due = self._due_on_disk = False

    def came(self, member: str) -> list[Action]:
        """A member is there, or is back."""
        self.missing.discard(member)
        return self._gather() if self.phase is Phase.WAITING and not self.missing else []

    def _gather(self) -> list[Action]:
        self.phase = Phase.GATHERING
        self._forget_plans()
        self.epoch = next(self._epochs)
        self._reports = {}
        return [Halt(member, self.epoch) for member in self.members]

    def reported(self, member: str, epoch: int, report: Report) -> list[Action]:
        """A member has stopped, and has this."""
        if self.phase is not Phase.GATHERING or epoch != self.epoch:
            return []
        self._reports[member] = report
        if len(self._reports) < len(self.members):
            return []
        known = {snapshot for report in self._reports.values() for snapshot in report.own}
        known |= {snapshot for report in self._reports.values() for _, snapshot in report.kept}
        known |= self._sealed
        whole = [snapshot for snapshot in known if all(self._sources(member, snapshot) for member in self.members)]
        if whole:
            return self._restore(max(whole))
        started = self.committed is not None or any(snapshot.step for snapshot in known)
        if started or self._lost_any:
            self.phase = Phase.ENDED
            return [Lost(self._without_parts(known), started)]
        return self._take(write=False, then=Phase.SETTLING)

    def _sources(self, member: str, snapshot: Snapshot) -> list[str | None]:
        """Where a member's part can be had, best first."""
        sources: list[str | None] = [None] if snapshot in self._reports[member].own else []
        sources += [name for name, report in self._reports.items() if (member, snapshot) in report.kept]
        return [*sources, DISK] if snapshot in self._sealed else sources

    def _without_parts(self, known: Collection[Snapshot]) -> tuple[str, ...]:
        newest = max(known, default=None)
        return tuple(member for member in self.members if newest is None or not self._sources(member, newest))

    def _restore(self, snapshot: Snapshot) -> list[Action]:
        self.phase = Phase.RESTORING
        self._target = snapshot
        self._awaited = set(self.members)
        return [
            Restore(member, self.epoch, snapshot, self._sources(member, snapshot)[0], self._lacking(member, snapshot))
            for member in self.members
        ]

    def _lacking(self, member: str, snapshot: Snapshot) -> tuple[str, ...]:
        return tuple(name for name in self.holders[member] if (member, snapshot) not in self._reports[name].kept)

    def restored(self, member: str, epoch: int) -> list[Action]:
        """A member is as it was, and so are the copies of its part."""
        if self.phase is not Phase.RESTORING or epoch != self.epoch:
            return []
        self._awaited.discard(member)
        if self._awaited:
            return []
        assert self._target is not None
        self.phase = Phase.RUNNING
        self.step = self._target.step
        self._lost_any = False
        return [*self._commit(self._target), Resume(self.step)]

    # --- snapshots ---

    def step_ended(self, *, take: bool = False, write: bool = False, final: bool = False) -> list[Action]:
        """One more step is done everywhere; whether a snapshot is due, also to disk, or the last one, to be waited for.

        One that falls due while the one before is still travelling is taken after a later step."""
        self.step += 1
        self._due |= take
        self._due_on_disk |= write
        if final:
            return self.settle(write)
        if not self._due or self._pending is not None:
            return [Resume(self.step)]
        return self._take(write=self._due_on_disk and self._writing is None, then=Phase.COPYING)

    def settle(self, write: bool) -> list[Action]:
        """The state as it is now is to be safe before anything else happens."""
        if self._pending is not None or self._writing is not None:
            self._final = write
            self.phase = Phase.SETTLING
            return []
        safe = self.committed
        if safe is not None and safe.step == self.step and (safe in self._sealed or not write):
            return [Resume(self.step)]
        return self._take(write=write, then=Phase.SETTLING)

    def _take(self, *, write: bool, then: Phase) -> list[Action]:
        self.phase = then
        self._pending = snapshot = Snapshot(self.step, self.epoch, self._driver)
        self._awaited, self._unsafe = set(self.members), set(self.members)
        self._final = None
        self._due, self._due_on_disk = False, self._due_on_disk and not write
        write = write or not any(self.holders.values())  # then only the disk makes it safe
        if write:
            self._writing, self._unwritten = snapshot, set(self.members)
        return [Take(member, self.epoch, snapshot, self.holders[member], write) for member in self.members]

    def copied(self, member: str, snapshot: Snapshot) -> list[Action]:
        """A member has copied its state aside, and may change it."""
        if snapshot != self._pending:
            return []
        self._awaited.discard(member)
        actions = self._safe()
        if not self._awaited and self.phase is Phase.COPYING:
            self.phase = Phase.RUNNING
            actions.append(Resume(self.step))
        return actions

    def arrived(self, member: str, snapshot: Snapshot) -> list[Action]:
        """All holders of a member have its part."""
        if snapshot != self._pending:
            return []
        self._unsafe.discard(member)
        return self._safe()

    def written(self, member: str, snapshot: Snapshot) -> list[Action]:
        """A member's part is on disk; without holders that is what makes it safe."""
        if snapshot != self._writing:
            return []
        self._unwritten.discard(member)
        if self._unwritten:
            return []
        self._writing = None
        self._sealed.add(snapshot)
        return [Seal(snapshot), *self._safe()]

    def _safe(self) -> list[Action]:
        actions: list[Action] = []
        pending = self._pending
        if pending is not None and not self._unsafe and not self._awaited:
            self._pending = None
            actions += self._commit(pending)
        if self.phase is Phase.SETTLING and self._pending is None and self._writing is None:
            if self._final is not None:
                return actions + self._take(write=self._final, then=Phase.SETTLING)
            self.phase = Phase.RUNNING
            actions.append(Resume(self.step))
        return actions

    def _commit(self, snapshot: Snapshot) -> list[Action]:
        self.committed = snapshot
        self._lost_any = False
        return [Commit(member, self.epoch, snapshot) for member in self.members]


def ring(members: Sequence[str], copies: int) -> Mapping[str, tuple[str, ...]]:
    """Who keeps whose parts: each member's are kept by those behind it in the list."""
    count = len(members)
    return {
        member: tuple(members[(at + distance) % count] for distance in range(1, min(copies, count - 1) + 1))
        for at, member in enumerate(members)
    }
