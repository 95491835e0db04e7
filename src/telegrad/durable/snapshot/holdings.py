"""`holdings.py` decides what one worker has of a run: its own states, those it keeps for others, and which may be used.

It copies and sends nothing. States are opaque here; a snapshot of a worker is the state of everything durable on it.
Each message of a driver carries its epoch. One that is older than what this worker has heard comes from a driver, or
from a part of the run, that was given up: it is refused, so that whatever was under way then cannot undo a return.
"""

from typing import Generic, TypeVar

from telegrad.durable.snapshot.names import Report, Snapshot
from telegrad.errors import RunSuperseded

State = TypeVar("State")


class Holdings(Generic[State]):
    """The snapshots of one run on one worker."""

    def __init__(self) -> None:
        self.epoch = 0
        self.live = True  # whether the values may be used: not between a halt and the end of a restore
        self.own: dict[Snapshot, State] = {}
        self.kept: dict[tuple[str, Snapshot], State] = {}

    def __repr__(self) -> str:
        own = ", ".join(map(str, sorted(self.own))) or "none"
        return f"<Holdings in epoch {self.epoch:x}: own {own}; {len(self.kept)} kept for others>"

    def check(self, epoch: int) -> None:
        """Refuse what belongs to an epoch that is over."""
        if epoch < self.epoch:
            raise RunSuperseded(
                f"a message of epoch {epoch:x} came when the run was in epoch {self.epoch:x}: the step, or the driver, "
                "that it belongs to was given up. If two programs drive runs of one name, give them two names"
            )

    def halt(self, epoch: int) -> None:
        """A run begins here, or returns: nothing of older epochs counts any more."""
        self.check(epoch)
        self.epoch = epoch
        self.live = False

    def report(self) -> Report:
        """What there is to return to."""
        return Report(frozenset(self.own), frozenset(self.kept))

    def take(self, epoch: int, snapshot: Snapshot, state: State) -> None:
        """This worker's own part of a snapshot: just copied, or given back by whoever kept it."""
        self.check(epoch)
        self.own[snapshot] = state
        self.live = True

    def keep(self, epoch: int, owner: str, snapshot: Snapshot, state: State) -> None:
        """Another worker's part. One that has not been halted yet, as it was just started, takes it as well."""
        self.check(epoch)
        self.kept[owner, snapshot] = state

    def commit(self, epoch: int, snapshot: Snapshot) -> dict[Snapshot, State]:
        """All of `snapshot` is safe: forget older ones, and those of epochs that are over. Returns own ones forgotten.

        A snapshot that is being taken is younger, and stays."""
        self.check(epoch)

        def is_past(other: Snapshot) -> bool:
            return other != snapshot and (other.epoch != epoch or other < snapshot)

        self.kept = {key: state for key, state in self.kept.items() if not is_past(key[1])}
        past = [old for old in self.own if is_past(old)]
        return {old: self.own.pop(old) for old in past}

    def forget(self) -> None:
        """The run is to begin anew."""
        self.own.clear()
        self.kept.clear()
