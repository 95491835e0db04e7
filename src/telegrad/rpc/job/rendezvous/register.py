"""What a large job keeps in its store beside the log of members, so that nobody has to read all of it in order to join.

The latest record of each worker stands under its id, and the id of a worker under its name. Counters say how many have
come, and how many of them to each host. So a worker that joins watches one number, and reads the record of another when
it first needs it; what all workers read together grows with their number, where a log that all read would grow with its
square. What does not go as usual (two of one name, a worker started again while others wait) is marked in the counter,
and then the log is read, which tells all.

    worker/<id>                the latest record of that worker, sealed
    name/<name>                the id of the worker of that name: a hint, since only its record is sealed
    relayed/<id>               whether somebody has repeated the record of a worker in a store that was opened anew
    met                        in a store that was opened anew: all workers had come before
    start <g>/came             how many have come that were started g times before
    start <g>/host/<host>      how many of them to that host; `/<number>` has their ids, `/place` the host's number
    start <g>/hosts            how many hosts there are; `/<place>` has their identities
    start <g>/maps, /checked   how many workers have device maps, and how many of these have found them right
"""

from collections.abc import Callable, Sequence

from telegrad.rpc.job.rendezvous.store_client import Prefixed
from telegrad.rpc.workers import Member

_READ_BY_ALL = 64  # workers of a job in which each reads the records of all, in one request
_LOOK_CLOSER = 1 << 32  # added to a counter: it does not tell all, read the log
_MOST_AHEAD = 64  # records that are read ahead of need


def is_large(world_size: int | None) -> bool:
    """Whether a job has a register: one of fixed size, in which it would be too much if all read the records of all."""
    return world_size is not None and world_size > _READ_BY_ALL


class Register:
    """The register of a job of so many workers. `opened` gives the record in a value, if it is one of this job."""

    def __init__(self, log: Prefixed, world_size: int, opened: Callable[[bytes], Sequence[Member]]) -> None:
        self._log = log
        self._world_size = world_size
        self._opened = opened
        self._entered = b""  # the record of this worker as it was written
        self._next, self._ahead = -1, 1  # one that reads record after record is given more of them at a time

    # --- who ---

    def enter(self, member: Member, sealed: bytes) -> bool:
        """Write the record of this worker, or that it leaves; whether its name is no other's."""
        key = f"worker/{member.worker_id}"
        if member.leaving:
            self._log.compare_set(key, self._entered, sealed)  # unless another was started in its place
            return True
        self._entered = sealed
        there = self._log.compare_set(key, b"", sealed)
        while there != sealed and not any(other.generation > member.generation for other in self._opened(there)):
            there = self._log.compare_set(key, there, sealed)
        return self._claim(member)

    def _claim(self, member: Member) -> bool:
        key, mine, holder = f"name/{member.name}", str(int(member.worker_id)), ""
        while True:
            found = self._log.compare_set(key, holder, mine).decode()
            if found == mine:
                return True
            if found == holder or any(not m.leaving and m.name == member.name for m in self._at([found])):
                return False
            holder = found  # it has left, or has another name by now

    def enter_relayed(self, member: Member, sealed: bytes) -> bool:
        """Write the record of another worker in a store that was opened anew; whether nobody else has done so."""
        if self._log.add(f"relayed/{member.worker_id}", 1) > 1:
            return False
        self._log.compare_set(f"name/{member.name}", "", str(int(member.worker_id)))
        return self._log.compare_set(f"worker/{member.worker_id}", b"", sealed) == sealed

    def records_of(self, who: str | int) -> list[Member]:
        """The record of a worker, and those of some behind it where workers are looked for one after another."""
        if isinstance(who, str):
            found = self._log.get_all([f"name/{who}"])
            if found is None or not found[0].isdigit():
                return []
            who = int(found[0])
        if not 0 <= who < self._world_size:
            return []
        self._ahead = min(2 * self._ahead, _MOST_AHEAD) if who == self._next else 1
        ids = range(who, min(who + self._ahead, self._world_size))
        records = self._at(ids)
        self._next = ids.stop if records else -1
        return records or self._at([who])

    def record_of(self, worker_id: int) -> Member | None:
        """The record of one worker."""
        return next(iter(self._at([worker_id] if 0 <= worker_id < self._world_size else [])), None)

    def _at(self, worker_ids: Sequence[int | str]) -> list[Member]:
        """The records of workers; none if some are not there."""
        values = (self._log.get_all([f"worker/{worker_id}" for worker_id in worker_ids]) if worker_ids else None) or []
        found = [(str(i), m) for i, value in zip(worker_ids, values, strict=False) for m in self._opened(value)]
        return [member for worker_id, member in found if str(int(member.worker_id)) == worker_id]

    # --- how many ---

    def arrive(self, member: Member) -> None:
        """This worker is here, in every way that is counted."""
        start, host = f"start {member.generation}", f"start {member.generation}/host/{member.host}"
        number = self._log.add(host, 1)
        self._log.set(f"{host}/{number}", str(int(member.worker_id)))
        if number == 1:
            place = self._log.add(f"{start}/hosts", 1)
            self._log.set(f"{start}/hosts/{place}", member.host)
            self._log.set(f"{host}/place", str(place))
        if member.device_maps or member.devices:
            self._log.add(f"{start}/maps", 1)
        self._number = number
        self._log.add(f"{start}/came", 1)  # last: whoever sees that all have come finds the rest, too

    def mark(self, generation: int) -> None:
        """Have all who watch the counter read the log."""
        self._log.add(f"start {generation}/came", _LOOK_CLOSER)

    def mark_earlier(self, generation: int) -> None:
        """A worker was started again. Those who wait in an earlier start, for it, perhaps, have to look closer."""
        for earlier in range(generation):
            if self.missing(earlier) > 0:
                self.mark(earlier)

    def missing(self, generation: int) -> int:
        """How many have not come yet that were started so often; negative: the log tells."""
        return self._world_size - self._log.add(f"start {generation}/came", 0)

    def on_host(self, member: Member) -> int:
        """How many have come to the host of this worker."""
        return self._log.add(f"start {member.generation}/host/{member.host}", 0)

    def counterpart(self, member: Member) -> int | None:
        """The id of the worker that has this one's number on the next host; None if all are on one."""
        start = f"start {member.generation}"
        hosts = self._log.add(f"{start}/hosts", 0)
        if hosts < 2:
            return None
        place = int(self._log.get(f"{start}/host/{member.host}/place"))
        found = self._log.get_all([f"{start}/hosts/{place % hosts + 1}"])
        host = f"{start}/host/{found[0].decode()}" if found else ""
        number = (self._number - 1) % max(1, self._log.add(host, 0)) + 1
        found = self._log.get_all([f"{host}/{number}"])  # None if somebody who is no worker has counted, too
        return int(found[0]) if found and found[0].isdigit() else None

    def unchecked(self, generation: int) -> int:
        """How many workers with device maps have not found them right yet; negative: one has found them wrong."""
        start = f"start {generation}"
        return self._log.add(f"{start}/maps", 0) - self._log.add(f"{start}/checked", 0)

    def say_checked(self, generation: int, are_right: bool) -> None:
        """Say what this worker has found of its device maps."""
        self._log.add(f"start {generation}/checked", 1 if are_right else _LOOK_CLOSER)

    # --- a store that was opened anew ---

    def restore(self, generation: int, had_met: bool) -> None:
        """In a store that was opened anew nobody is counted; `had_met`: all had come before."""
        if had_met:
            self._log.set("met", "yes")
        for start in range(generation + 1):
            self.mark(start)

    def have_met(self) -> bool:
        """Whether all had come before this store was opened."""
        return self._log.check("met")
