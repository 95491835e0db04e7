"""Which records of members a worker believes as it joins and as it leaves, and who counts as present when it joins."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from telegrad.errors import RendezvousError, TelegradError
from telegrad.ids import generation_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.presence import process_state, seems_alive
from telegrad.rpc.layer import Layer
from telegrad.rpc.workers import Member

# For the dead whose engine starts them again. After that, if others of their time live on, the job goes on without.
COMEBACK_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 0.25


class Clash(RendezvousError):
    """Two living workers of one name or rank."""


class Membership(Layer):
    """What one agent makes of the records of members, whichever thread reads them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._joining: Joining | None = None
        self._leaving = False

    def on_news(self, members: Sequence[Member]) -> Sequence[Member]:
        """A call that is served while this worker joins may look for its own callee, and read the news first."""
        if self._joining is not None:
            return self._joining.take(members)
        if self._leaving:
            return [member for member in members if not member.leaving]
        return members

    @contextlib.contextmanager
    def joining(self, member: Member, world_size: int | None) -> Iterator["Joining"]:
        """Look for clashes with this worker's own record, which is being published."""
        self._joining = Joining(self._agent, member, world_size)
        try:
            yield self._joining
        finally:
            self._joining = None

    @contextlib.contextmanager
    def leaving_together(self) -> Iterator[None]:
        """All leave: those who are quicker have said so before the last barrier, and still take part in it."""
        self._leaving = True
        try:
            yield
        finally:
            self._leaving = False


class Joining:
    """What a worker that joins has seen of the others."""

    def __init__(self, agent: Agent, member: Member, world_size: int | None) -> None:
        self._agent = agent
        self._member = member
        self._generation = generation_of(member.incarnation)
        self._world_size = world_size
        self.seen = {member.name: member}  # the records of all who came, also of those who have left again
        self._left: set[int] = set()  # who has been here this time and has left again: it is not waited for
        self._clash: RendezvousError | None = None
        self._dead_since: dict[int, float] = {}  # incarnations that were found dead, and when
        self._alive: dict[int, float] = {}  # incarnations that were found alive, and when
        self.predecessor: Member | None = None  # who had this worker's id before
        # Whether all had come before the store was opened anew, which may then have no record of some that died.
        self.had_met: Callable[[], bool] = lambda: False
        self._unheard_since: dict[int, float] = {}

    def take(self, members: Sequence[Member]) -> Sequence[Member]:
        """Records were read: those of others. A clash is raised by `present`, in the thread that joins."""
        mine = self._member
        try:
            _check_clash(self._agent, members, mine, self._world_size)
        except RendezvousError as clash:
            self._clash = clash
        for member in members:
            if not member.leaving and generation_of(member.incarnation) >= self._generation:
                self.seen[member.name] = member
            if member.worker_id == mine.worker_id:
                self._note_predecessor(member)
            elif member.leaving and generation_of(member.incarnation) >= self._generation:
                self._left.add(int(member.worker_id))
        return [m for m in members if m.worker_id != mine.worker_id]

    def _note_predecessor(self, member: Member) -> None:
        if member.incarnation == self._member.incarnation or generation_of(member.incarnation) > self._generation:
            return
        if not member.leaving:
            self.predecessor = member
        elif self.predecessor is not None and self.predecessor.incarnation == member.incarnation:
            self.predecessor = None

    def present(self) -> set[int]:
        """The ids of those who are here, or have been this time.

        A record alone says little: the engine may have ended all workers and be starting them again. So the dead of
        earlier starts are waited for. Only where some live on from before, and only this worker was started again, does
        the job go on without a dead one that does not come back. One that was started as often as this worker has been
        here this time, however short."""
        if self._clash is not None:
            raise self._clash
        known = {int(m.worker_id): m for m in self._agent.directory.members()}
        here = self._left | known.keys()
        here |= self._given_up(known, here)
        if self._world_size is not None and len(here) >= self._world_size:  # else there is no hurry to look closer
            before = {i: member for i, member in known.items() if generation_of(member.incarnation) < self._generation}
            dead = {worker_id for worker_id, member in before.items() if self.is_dead(member)}
            if dead and not self._goes_on_without(known, dead):
                return here - dead
        return here

    def _given_up(self, known: dict[int, Member], here: set[int]) -> set[int]:
        """Those who were here before the store was opened anew and are not heard of since: dead like others that do not
        come back."""
        unheard = set(range(self._world_size or 0)) - here
        if not unheard or not self.had_met():
            return set()
        now = time.monotonic()
        since = max([self._unheard_since.setdefault(worker_id, now) for worker_id in unheard])
        return unheard if now - since >= COMEBACK_SECONDS and self._has_survivors(known, set()) else set()

    def is_dead(self, member: Member) -> bool:
        """Whether a worker is gone. One on another host is asked only if it may be of an earlier start."""
        if member.incarnation == self._member.incarnation:
            return False
        if self._agent.is_dead(member):
            self._dead_since.setdefault(member.incarnation, time.monotonic())
            return True
        alive = process_state(member)
        if alive is None and self._generation:
            now = time.monotonic()
            if now - self._alive.get(member.incarnation, now - 60) < 60:
                return False
            if now - self._dead_since.get(member.incarnation, now - 60) < _ASK_AGAIN_SECONDS:
                return True
            alive = seems_alive(member)
            if alive:
                self._alive[member.incarnation] = now
        if alive is False:
            self._dead_since.setdefault(member.incarnation, time.monotonic())
        return alive is False

    def _has_survivors(self, known: dict[int, Member], dead: set[int]) -> bool:
        return any(
            generation_of(member.incarnation) < self._generation
            for worker_id, member in known.items()
            if worker_id not in dead and member.incarnation != self._member.incarnation
        )

    def _goes_on_without(self, known: dict[int, Member], dead: set[int]) -> bool:
        now = time.monotonic()
        return self._has_survivors(known, dead) and all(
            now - self._dead_since.get(known[worker_id].incarnation, now) >= COMEBACK_SECONDS for worker_id in dead
        )


def _check_clash(agent: Agent, members: Sequence[Member], mine: Member, world_size: int | None) -> None:
    """Two living workers of one name are a mistake. The same rank again is a restart, so is the name of a dead one."""
    present = {m.worker_id: m for m in agent.directory.members()}
    for member in members:
        if not member.leaving:
            present[member.worker_id] = member
        elif member.worker_id in present and present[member.worker_id].incarnation == member.incarnation:
            del present[member.worker_id]
    present[mine.worker_id] = mine
    names: dict[str, Member] = {mine.name: mine}
    for member in present.values():
        other = names.setdefault(member.name, member)
        if other is member:
            continue
        # In an open job a name that comes back has another id, and its old record stays: that concerns only itself.
        if world_size is not None or (other is mine and _answers(agent, member)):
            raise Clash(
                f"RPC worker name {member.name!r} is not unique: workers {other.worker_id} and {member.worker_id} both "
                "use it. Give each worker a name of its own"
            )


def _answers(agent: Agent, member: Member) -> bool:
    try:
        agent.link(member).connection()
    except (TelegradError, OSError):
        return False
    return True
