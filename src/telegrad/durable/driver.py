"""The driver's shell around `core.py`: it calls the members, hears their answers and theirs alone decides what is next.

All of it happens in the thread of the training loop. Answers come through a queue, filled by whichever thread has them;
between steps the queue is emptied without waiting, and only a return, or a snapshot being copied, is waited for.
"""

import itertools
import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from telegrad import rpc
from telegrad.durable import worker
from telegrad.durable.core import Action, Commit, Coordinator, Halt, Lost, Restore, Resume, Seal, Take
from telegrad.durable.part import Recipe, parts_of
from telegrad.durable.snapshot import disk
from telegrad.errors import DurableError, RunSuperseded, StateLost, WorkerDied
from telegrad.ids import generation_of
from telegrad.rpc.agent import Agent

log = logging.getLogger("telegrad.durable")

_GENERATION_SHIFT = 32
_LOOK_SECONDS = 0.02
_epochs = itertools.count(1)  # one for all runs of a process: a name that is used again is in a later epoch


class Return(NamedTuple):
    """One return to a snapshot: who had died, after which step, to which, and how long it took."""

    died: tuple[str, ...]
    from_step: int
    to_step: int
    seconds: float


class Settings(NamedTuple):
    """What a run was told when it was made."""

    run: str
    copies: int
    every: int
    folder: Path | None
    disk_every: int
    timeout: float
    restart_timeout: float


def next_epoch(agent: Agent) -> int:
    """An epoch later than any of this driver's, and of the incarnations before it."""
    return generation_of(agent.member.incarnation) << _GENERATION_SHIFT | next(_epochs)


class Driver:
    """One run, from the side of the worker that has the training loop."""

    def __init__(
        self,
        agent: Agent,
        settings: Settings,
        declaration: int,
        recipes: Mapping[str, list[Recipe]],
        incarnations: dict[str, int],
    ) -> None:
        self._agent = agent
        self._settings = settings
        self._declaration = declaration
        self._recipes = recipes
        self._incarnations = incarnations  # those that are part of the run now
        self.members = (agent.info.name, *(name for name in recipes if name != agent.info.name))
        folder = settings.folder
        self.core = Coordinator(
            self.members,
            settings.copies,
            iter(lambda: next_epoch(agent), None),
            agent.member.incarnation,
            [] if folder is None else disk.sealed(folder, self.members),
        )
        self.returns: list[Return] = []
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._resumed = False
        self._lost: dict[str, float] = {}  # who is waited for, and since when
        self._return: tuple[float, list[str]] | None = None  # when one began, and who had died
        parts_of(agent).driven[settings.run] = self._noted

    # --- what the loop calls ---

    def begin(self, lost_before: Sequence[str]) -> None:
        """All values have been declared: find out where the run stands, and go there."""
        for member in lost_before:  # and is back
            self.core.died(member)
            self.core.came(member)
        self._perform(self.core.start())
        self._until_resumed()
        if self.core.step:
            log.info("run %r goes on after step %d", self._settings.run, self.core.step)

    def step_ended(self, final: bool) -> None:
        """A step is done on all members; take a snapshot if one is due, or return if somebody has died meanwhile."""
        self._take_in_events()
        if self.look_at_members():
            self._until_resumed()
            return
        settings, step = self._settings, self.core.step + 1
        write = settings.folder is not None and (final or step % settings.disk_every == 0)
        self._resumed = False
        self._perform(self.core.step_ended(take=write or step % settings.every == 0, write=write, final=final))
        self._until_resumed()

    def undo(self) -> None:
        """A step failed for a reason of its own, and may be half done: return to the last snapshot."""
        self._resumed = False
        self._perform(self.core.start())
        self._until_resumed()

    def recover(self) -> None:
        """A step failed because somebody died: return to the last snapshot."""
        self._until_resumed()

    def died_by(self, error: BaseException) -> bool:
        """Whether an error of a step is the death of a member; then the step will run again."""
        self._take_in_events()  # what was heard before: a snapshot may just have become whole
        if isinstance(error, WorkerDied) and error.worker in self.members:
            self._died(error.worker)
            return True
        return self.look_at_members()

    def look_at_members(self) -> bool:
        """Whether somebody has died, or been started again, since the last return."""
        directory, is_dead = self._agent.directory, self._agent.is_dead
        for name in self.members:
            member = directory.by_name(name)
            if member is None or member.incarnation != self._incarnations.get(name) or is_dead(member):
                self._died(name)
        return bool(self.core.missing)

    def close(self) -> None:
        """Have all members forget the run."""
        for member in self.members:
            if member == self._agent.info.name:
                worker.forget(self._settings.run)
                continue
            try:
                rpc.rpc_sync(member, worker.forget, (self._settings.run,), timeout=self._settings.timeout)
            except WorkerDied:
                pass  # it has forgotten everything

    # --- deaths ---

    def _died(self, name: str) -> None:
        if name in self.core.missing:
            return
        if self._return is None:
            self._return = (time.monotonic(), [])
            log.warning(
                "run %r lost worker %r in step %d, and waits for it", self._settings.run, name, self.core.step + 1
            )
        self._return[1].append(name)
        self._lost[name] = time.monotonic()
        self._resumed = False
        self._perform(self.core.died(name))

    def _look_for_missing(self) -> None:
        agent, limit = self._agent, self._settings.restart_timeout
        waits = parts_of(agent).waiting[self._settings.run] = []
        found = {name: agent.find(name) for name in sorted(self.core.missing)}  # which reads the news
        # Another may have died as well and, unless it was asked something, nobody has noticed: all return together.
        self.look_at_members()
        for name, member in found.items():
            waits.append((f"run {self._settings.run!r}: the return of worker {name!r}", -1))
            if not agent.is_dead(member):
                self._incarnations[name] = member.incarnation
                del self._lost[name]
                self._perform(self.core.came(name))
            elif time.monotonic() - self._lost[name] > limit:
                raise WorkerDied(
                    f"worker {name!r} of run {self._settings.run!r} died and was not started again within {limit:g} s; "
                    f"the run stands at step {self.core.committed.step if self.core.committed else 0}. Start the "
                    "worker "
                    "under its name, or have it restarted: local_cluster(restart=True), telegrad run --max-restarts",
                    worker=name,
                    incarnation=member.incarnation,
                )

    # --- what happens ---

    def _until_resumed(self) -> None:
        while not self._resumed:
            try:
                self._events.get(timeout=_LOOK_SECONDS)()
            except queue.Empty:
                if self.core.missing:
                    self._look_for_missing()
                else:
                    self.look_at_members()

    def _take_in_events(self) -> None:
        while not self._events.empty():
            self._events.get()()

    def _noted(self, what: str, who: str, snapshot: Any) -> None:
        """A member says something by itself; called by the thread that serves it."""
        if what == "failed":
            self._events.put(lambda: self._raise(DurableError(who)))
        else:
            self._events.put(lambda: self._perform(getattr(self.core, what)(who, snapshot)))

    def _raise(self, error: Exception) -> None:
        raise error

    def _perform(self, actions: Sequence[Action]) -> None:
        mine: list[Callable[[], None]] = []  # done last: the others work meanwhile
        for action in actions:
            if isinstance(action, Resume):
                self._resume(action.step)
            elif isinstance(action, Lost):
                raise self._state_lost(action)
            elif isinstance(action, Seal):
                assert self._settings.folder is not None
                disk.seal(self._settings.folder, action.snapshot, self.members)
            else:
                self._ask(action, mine)
        for do in mine:
            do()

    def _resume(self, step: int) -> None:
        self._resumed = True
        parts_of(self._agent).waiting.pop(self._settings.run, None)
        if self._return is not None:
            began, died = self._return
            self._return = None
            seconds = time.monotonic() - began
            self.returns.append(Return(tuple(died), self._from_step, step, seconds))
            log.warning("run %r goes on after step %d, %.2f s later", self._settings.run, step, seconds)
        self._from_step = step

    _from_step = 0

    def _ask(self, action: Halt | Take | Restore | Commit, mine: list[Callable[[], None]]) -> None:
        run, timeout, folder, driver = self._settings.run, self._settings.timeout, self._settings.folder, self._agent
        member, epoch = action.member, action.epoch
        where = None if folder is None else str(folder)
        function: Any
        args: tuple[Any, ...]
        answer: Callable[[Any], list[Action]]
        if isinstance(action, Halt):
            function, args = worker.halt, (run, epoch, timeout)
            answer = lambda report: self.core.reported(member, epoch, report)  # noqa: E731 - one for each action
        elif isinstance(action, Take):
            snapshot, holders = action.snapshot, action.holders
            function = worker.take
            args = (run, epoch, snapshot, holders, where if action.write else None, driver.info.name, timeout)
            answer = lambda _: self.core.copied(member, snapshot)  # noqa: E731
        elif isinstance(action, Restore):
            function = worker.restore
            recipes = tuple(self._recipes[member]) if member != driver.info.name else ()
            args = (run, epoch, driver.info.name, self._declaration, *action[2:], where, recipes, timeout)
            answer = lambda _: self.core.restored(member, epoch)  # noqa: E731
        else:
            function, args = worker.commit, (run, epoch, action.snapshot)
            answer = lambda _: []  # noqa: E731
        if member == driver.info.name:
            mine.append(lambda: self._heard(member, epoch, lambda: function(*args), answer))
            return
        future: rpc.Future[Any] = rpc.rpc_async(member, function, args, timeout=timeout)
        future.add_done_callback(lambda done: self._events.put(lambda: self._heard(member, epoch, done.value, answer)))

    def _heard(self, member: str, epoch: int, value: Callable[[], Any], answer: Callable[[Any], list[Action]]) -> None:
        """What was asked of a member has an answer."""
        try:
            result = value()
        except WorkerDied as error:
            if epoch == self.core.epoch:
                self._died(error.worker if error.worker in self.members else member)
            return
        except Exception as error:
            if epoch == self.core.epoch and not self.core.missing and not self.look_at_members():
                if isinstance(error, RunSuperseded):
                    log.error("run %r is driven by another program", self._settings.run)
                raise
            return
        self._perform(answer(result))

    def _state_lost(self, lost: Lost) -> Exception:
        run, names = self._settings.run, ", ".join(repr(name) for name in lost.members)
        if not lost.started:
            return StateLost(
                f"run {run!r} lost a worker before its first snapshot was safe: what the program had done to its "
                "values is lost. Start the program again"
            )
        return StateLost(
            f"run {run!r} cannot go on: no copy of the state of {names} is left. The worker and all "
            f"{self._settings.copies} that kept copies of it died together, and no whole snapshot is on disk. Raise "
            "`copies`, or give a `directory`"
        )
