"""A driver and a worker through every order of their messages, with a death at every moment, the driver's included.

And many lives of three and four workers, with more deaths, whose orders are too many to see them all.

The two cores are real; the processes around them only move messages, one at a time, and a state is the list of epochs
in which its steps were made, so that a mixture of two attempts would show. Requests from one worker to another arrive
in their order, and so do their answers; commits, deaths, restarts and who hears of them when are free.

Whatever the order: the run ends after its last step with all workers in one state, and its members hold a whole
snapshot at every moment, as long as nobody dies whose copies have just died, too.
"""

import itertools
import random
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from telegrad.durable.core import DISK, Commit, Coordinator, Halt, Lost, Phase, Restore, Resume, Seal, Take
from telegrad.durable.snapshot.holdings import Holdings
from telegrad.durable.snapshot.names import Snapshot
from telegrad.errors import RunSuperseded
from tests.exploring import Chance, explore

DRIVER = "d"
ANSWERS = ("applied", "reported", "copied", "arrived", "written", "restored", "died")  # to the driver
Value = tuple[int, ...]


class Process:
    """One incarnation of one worker."""

    def __init__(self, name: str, generation: int) -> None:
        self.name = name
        self.generation = generation
        self.holdings: Holdings[Value] = Holdings()
        self.value: Value | None = None  # what a user's module would be
        self.waits: list[list[Any]] = []  # [what to tell the driver, whose answers it needs]

    def state(self) -> Hashable:
        holdings = self.holdings
        return (
            self.generation,
            holdings.epoch,
            holdings.live,
            tuple(sorted(holdings.own.items())),
            tuple(sorted(holdings.kept.items())),
            self.value,
            repr(self.waits),
        )


class World:
    """Some workers, the messages between them, and a disk."""

    def __init__(self, chance: Chance, members: str, copies: int, steps: int, deaths: int, disk: bool) -> None:
        self.chance = chance
        self.members = tuple(members)
        self.copies, self.steps, self.deaths, self.disk = copies, steps, deaths, disk
        self.channels: dict[tuple[str, str, str], deque[tuple[Any, ...]]] = {}
        self.processes = {name: Process(name, 0) for name in members}
        self.sealed: dict[Snapshot, None] = {}
        self.own: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.files: dict[tuple[str, Snapshot], Value] = {}
        self.ever_safe = False
        self.finished = False
        self.lost = False
        self.start_driver(0)

    # --- the driver ---

    def start_driver(self, generation: int) -> None:
        epochs = itertools.count((generation << 8) + 1)
        self.core = Coordinator(self.members, self.copies, epochs, generation, list(self.sealed))
        self.applying: set[str] = set()
        for name in self.members:  # the program declares its values, on all who are there
            if name in self.processes:
                self.processes[name].value = ()
                self.processes[name].waits.clear()
            else:
                self.core.died(name)
        self.perform(self.core.start())

    def perform(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Resume):
                self.check_one_state(action.step)
                self.ever_safe = True
                if action.step == self.steps:
                    self.finished = True
                else:
                    self.applying = set(self.members)
                    for name in self.members:
                        self.send("ask", DRIVER, name, "apply", self.core.epoch, action.step)
            elif isinstance(action, Lost):
                assert not self.ever_safe, action
                self.lost = True
            elif isinstance(action, Seal):
                self.sealed[action.snapshot] = None
            else:
                kind = "commit" if isinstance(action, Commit) else "ask"
                self.send(kind, DRIVER, action.member, action)

    def hear(self, sender: str, what: str, *about: Any) -> None:
        """An answer, or a notice, reaches the driver."""
        core = self.core
        if what == "applied" and core.phase is Phase.RUNNING and about[0] == core.epoch:
            self.applying.discard(sender)
            if not self.applying:
                last = core.step + 1 == self.steps
                self.perform(core.step_ended(take=True, write=self.disk, final=last))
        elif what == "died":
            self.perform(core.died(about[0]))
        elif what != "applied":
            self.perform(getattr(core, what)(sender, *about))

    # --- the members ---

    def take_message(self, sender: str, receiver: str, what: Any, *about: Any) -> None:
        """A message reaches a member: an action of the driver's core, or a word of another member."""
        process = self.processes[receiver]
        serve = getattr(self, f"serve_{what if isinstance(what, str) else type(what).__name__.lower()}")
        try:
            serve(process, sender, what, *about)
        except RunSuperseded:
            pass  # its sender hears so, and has given up already

    def serve_apply(self, process: Process, sender: str, _: Any, epoch: int, step: int) -> None:
        if process.value is None or not process.holdings.live:
            self.send("answer", process.name, DRIVER, "died", process.name)
            return
        assert len(process.value) == step, f"{process.name} makes step {step} after {process.value}"
        process.value = (*process.value, epoch)
        self.send("answer", process.name, DRIVER, "applied", epoch)

    def serve_halt(self, process: Process, sender: str, order: Halt) -> None:
        process.holdings.halt(order.epoch)
        process.waits.clear()
        self.send("answer", process.name, DRIVER, "reported", order.epoch, process.holdings.report())

    def serve_take(self, process: Process, sender: str, order: Take) -> None:
        assert process.value is not None
        process.holdings.take(order.epoch, order.snapshot, process.value)
        self.send("answer", process.name, DRIVER, "copied", order.snapshot)
        if order.write:
            self.files[process.name, order.snapshot] = process.value
            self.send("notice", process.name, DRIVER, "written", order.snapshot)
        self.ship(process, order.epoch, order.snapshot, order.holders, ("arrived", order.snapshot))

    def serve_restore(self, process: Process, sender: str, order: Restore) -> None:
        if order.source is None:
            self.load(process, order, process.holdings.own[order.snapshot])
        elif order.source == DISK:
            self.load(process, order, self.files[process.name, order.snapshot])
        elif order.source in self.processes:
            process.waits.append([order, {order.source}])
            self.send("ask", process.name, order.source, "give", order.snapshot)
        else:
            self.send("answer", process.name, DRIVER, "died", order.source)

    def serve_give(self, process: Process, sender: str, _: Any, snapshot: Snapshot) -> None:
        self.send("answer", process.name, sender, "given", process.holdings.kept.get((sender, snapshot)))

    def serve_given(self, process: Process, sender: str, _: Any, value: Value | None) -> None:
        for wait in [w for w in process.waits if isinstance(w[0], Restore) and w[1] == {sender}]:
            process.waits.remove(wait)
            assert value is not None, f"{sender} has not what it reported"
            self.load(process, wait[0], value)

    def serve_keep(self, process: Process, sender: str, _: Any, epoch: int, snapshot: Snapshot, value: Value) -> None:
        process.holdings.keep(epoch, sender, snapshot, value)
        self.send("answer", process.name, sender, "kept", epoch, snapshot)

    def serve_kept(self, process: Process, sender: str, _: Any, *what: Any) -> None:
        for wait in process.waits:
            if not isinstance(wait[0], Restore) and wait[2] == what:
                wait[1].discard(sender)
        self.finish_waits(process)

    def serve_commit(self, process: Process, sender: str, order: Commit) -> None:
        process.holdings.commit(order.epoch, order.snapshot)

    def load(self, process: Process, order: Restore, value: Value) -> None:
        if order.epoch < process.holdings.epoch:
            return
        process.holdings.take(order.epoch, order.snapshot, value)
        process.value = value
        self.ship(process, order.epoch, order.snapshot, order.holders, ("restored", order.epoch))

    def ship(
        self, process: Process, epoch: int, snapshot: Snapshot, holders: tuple[str, ...], tell: tuple[Any, ...]
    ) -> None:
        process.waits.append([tell, set(holders), (epoch, snapshot)])
        for holder in holders:
            if holder in self.processes:
                value = process.holdings.own[snapshot]
                self.send("ask", process.name, holder, "keep", epoch, snapshot, value)
            else:
                self.member_hears(process, holder)
        self.finish_waits(process)

    def finish_waits(self, process: Process) -> None:
        for wait in [w for w in process.waits if not w[1]]:
            process.waits.remove(wait)
            self.send("notice", process.name, DRIVER, *wait[0])

    def member_hears(self, process: Process, dead: str) -> None:
        for wait in [w for w in process.waits if dead in w[1]]:
            process.waits.remove(wait)
            if isinstance(wait[0], Restore) or wait[0][0] == "restored":
                self.send("answer", process.name, DRIVER, "died", dead)

    # --- what happens ---

    def send(self, kind: str, sender: str, receiver: str, *message: Any) -> None:
        if sender == receiver:  # a driver does its own part itself, after it has asked the others
            self.own.append((kind, message))
        elif receiver in self.processes:
            self.channels.setdefault((kind, sender, receiver), deque()).append(message)

    def do_own(self) -> None:
        while self.own:
            _, message = self.own.popleft()
            if message[0] in ANSWERS:
                self.hear(DRIVER, *message)
            else:
                self.take_message(DRIVER, DRIVER, *message)

    def deliver(self, kind: str, sender: str, receiver: str) -> None:
        channel = self.channels[kind, sender, receiver]
        message = channel.popleft()
        if not channel:
            del self.channels[kind, sender, receiver]
        if kind == "hear":
            for key in [key for key in self.channels if key[1:] == (sender, receiver)]:
                del self.channels[key]
            if receiver == DRIVER:
                self.perform(self.core.died(sender))
            else:
                self.member_hears(self.processes[receiver], sender)
        elif message[0] in ANSWERS:
            self.hear(sender, *message)
        else:
            self.take_message(sender, receiver, *message)

    def kill(self, name: str) -> None:
        del self.processes[name]
        self.own.clear()
        self.deaths -= 1
        for key in [key for key in self.channels if key[2] == name]:  # what it had sent may still arrive
            del self.channels[key]
        for other in self.processes:
            self.channels["hear", name, other] = deque([()])

    def whole_without(self, dead: set[str]) -> bool:
        """Whether the living have all parts of a snapshot, or the disk has."""
        living = [process for name, process in self.processes.items() if name not in dead]
        known = {s for p in living for s in p.holdings.own} | {s for p in living for _, s in p.holdings.kept}
        return bool(self.sealed) or any(
            all(
                any(s in p.holdings.own if p.name == m else (m, s) in p.holdings.kept for p in living)
                for m in self.members
            )
            for s in known
        )

    def options(self) -> list[str]:
        found = [f"{kind} {sender} {receiver}" for kind, sender, receiver in sorted(self.channels)]
        for name in self.members:
            if name not in self.processes:
                if not any(key[0] == "hear" and key[1] == name for key in self.channels):
                    found.append(f"start {name}")
            elif self.deaths and (not self.ever_safe or self.whole_without({name})):
                found.append(f"kill {name}")
        if DRIVER in self.processes:
            found += [f"see {name}" for name in sorted(self.core.missing) if name in self.processes]
        return found

    def happen(self, what: str) -> None:
        verb, *who = what.split()
        if verb == "kill":
            self.kill(*who)
        elif verb == "see":
            self.perform(self.core.came(*who))
        elif verb == "start":
            [name] = who
            self.generations[name] = self.generations.get(name, 0) + 1
            self.processes[name] = Process(name, self.generations[name])
            if name == DRIVER:
                self.start_driver(self.generations[name])
        else:
            self.deliver(verb, *who)

    generations: dict[str, int]

    def check_one_state(self, step: int) -> None:
        values = {name: process.value for name, process in self.processes.items()}
        assert len(set(values.values())) == 1, values
        assert {len(value or ()) for value in values.values()} == {step}, values

    def check_protected(self) -> None:
        """While the loop runs any one may die."""
        whole = len(self.processes) == len(self.members) and all(p.value is not None for p in self.processes.values())
        news = any(key[0] == "hear" for key in self.channels)
        if self.ever_safe and whole and not news and self.core.phase in (Phase.RUNNING, Phase.COPYING):
            for name in self.members:
                assert self.copies == 0 or self.whole_without({name}), f"{name} must not die now"

    def state(self) -> Hashable:
        core = vars(self.core)
        return (
            tuple((name, process.state()) for name, process in sorted(self.processes.items())),
            repr(sorted(self.channels.items())),
            repr(
                [(key, sorted(v) if isinstance(v, set) else v) for key, v in sorted(core.items()) if key != "_epochs"]
            ),
            tuple(sorted(self.applying)),
            self.deaths,
            self.ever_safe,
            tuple(self.sealed),
        )


def one_life(chance: Chance, **world: Any) -> None:
    made = World.__new__(World)
    made.generations = {}
    made.__init__(chance, **world)
    made.do_own()
    while not made.finished and not made.lost:
        if not chance.repeats:
            made.check_protected()
            chance.seen(made.state())
        options = made.options()
        assert options, f"nothing happens any more: {made.core}"
        made.happen(chance.choose(options))
        made.do_own()
    if made.finished:
        made.check_one_state(made.steps)


class Dice(Chance):
    """Chance for a walk through a world that is too large to see all of."""

    repeats = False  # every life is looked at

    def __init__(self, seed: int) -> None:
        super().__init__((), set())
        self._random = random.Random(seed)

    def choose(self, options: Sequence[str]) -> str:
        self.story.append(self._random.choice(options))
        return self.story[-1]

    def seen(self, state: Hashable) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copies", "steps", "deaths", "disk"),
    [
        (1, 2, 1, False),
        pytest.param(1, 1, 2, False, marks=pytest.mark.long),
        (1, 1, 1, True),
        (0, 1, 1, True),
    ],
)
def test_every_order_of_two_workers_leads_to_the_end(copies: int, steps: int, deaths: int, disk: bool) -> None:
    def run(chance: Chance) -> None:
        one_life(chance, members="da", copies=copies, steps=steps, deaths=deaths, disk=disk)

    assert explore(run, most=1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "copies", "steps", "deaths", "disk"),
    [("dab", 1, 3, 3, False), ("dab", 2, 3, 5, False), ("dabc", 2, 3, 6, True), ("dab", 0, 3, 4, True)],
)
def test_many_lives_of_more_workers(
    members: str, copies: int, steps: int, deaths: int, disk: bool, long_profile: bool
) -> None:
    for seed in range(100_000 if long_profile else 100):
        dice = Dice(seed)
        try:
            one_life(dice, members=members, copies=copies, steps=steps, deaths=deaths, disk=disk)
        except BaseException as error:
            error.add_note(f"seed {seed}, after: " + "; ".join(dice.story))
            raise
