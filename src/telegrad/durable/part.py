"""One worker's part of a run: its durable values, and the snapshots it has. `parts_of` finds it by the run's name.

Values are used by calls, in whichever thread; they are made, copied and restored by one call of the driver at a time,
under `lock`. `Holdings` has short methods of its own, guarded by `guard`, so that a copy for another worker is taken in
while this one is busy with its own.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from telegrad.durable.snapshot.copies import copy_aside
from telegrad.durable.snapshot.generators import load_generators, save_generators
from telegrad.durable.snapshot.holdings import Holdings
from telegrad.durable.snapshot.names import Snapshot
from telegrad.durable.snapshot.states import Access, access_to
from telegrad.errors import DurableError, NotRestored, RpcTimeout
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import Layer
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.wire.messages import BeginPass, PropagateGradients, RpcWithAutograd

_STEP_WORK = (RpcWithAutograd, PropagateGradients, BeginPass)  # what is served in the course of a step
_LOOK_SECONDS = 0.002

State = dict[str, Any]


class Recipe(NamedTuple):
    """How a durable value is made, again if need be, and how its state is read and written."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    save: Callable[[Any], Any] | None = None
    load: Callable[[Any, Any], Any] | None = None

    def access(self, value: Any) -> Access:
        """How to read and write the state of the value it made."""
        if self.save is not None and self.load is not None:
            return Access(self.save, self.load)
        return access_to(value)


class Value(NamedTuple):
    """A durable value beside its owner."""

    value: Any
    access: Access


@dataclass(eq=False)
class Part:
    """What one worker has of one run."""

    run: str
    agent: Agent
    driver: str = ""  # the name of the worker that drives the run, if it has declared anything here
    declaration: int = 0  # which `Run` declared the values: that of a driver's program, or of its next incarnation's
    values: dict[str, Value] = field(default_factory=dict)
    holdings: Holdings[State] = field(default_factory=Holdings)
    lock: threading.Lock = field(default_factory=threading.Lock)
    guard: threading.Lock = field(default_factory=threading.Lock)
    spare: State | None = None  # a copy that is not needed any more: its memory is
    sending: set[Snapshot] = field(default_factory=set)  # on their way: their memory must not be written over

    # --- values ---

    def make(self, recipe: Recipe) -> Any:
        """Make a value."""
        value = recipe.function(*recipe.args, **recipe.kwargs)
        self.values[recipe.name] = Value(value, recipe.access(value))
        return value

    def find(self, name: str) -> Any:
        """A durable value, if it may be used now."""
        found = self.values.get(name)
        if found is None or not self.holdings.live:
            raise not_restored(self.agent, self.run, name)
        return found.value

    # --- states ---

    def state(self) -> State:
        """A copy of everything durable here."""
        spare, self.spare = self.spare, None
        now = {
            "values": {name: value.access.save(value.value) for name, value in self.values.items()},
            "generators": save_generators(),
        }
        copied: State = copy_aside(now, spare)
        return copied

    def load(self, state: State, recipes: tuple[Recipe, ...]) -> None:
        """Return to a state; values that this incarnation does not have yet are made first."""
        for recipe in recipes:
            if recipe.name not in self.values:
                self.make(recipe)
        missing, unknown = set(self.values) - set(state["values"]), set(state["values"]) - set(self.values)
        if missing or unknown:
            raise DurableError(
                f"run {self.run!r} was saved with other values on worker {self.agent.info.name!r} than it declares "
                "now: "
                f"without {sorted(missing)}, with {sorted(unknown)}. Give the changed program another name for its "
                "run, or start it with resume=False"
            )
        fresh = copy_aside(state)  # what is loaded may be taken over as it is, and changed
        for name, (value, access) in self.values.items():
            access.load(value, fresh["values"][name])
        load_generators(fresh["generators"])

    def commit(self, epoch: int, snapshot: Snapshot) -> None:
        """Forget what is older than a snapshot, except for the memory."""
        with self.guard:
            forgotten = self.holdings.commit(epoch, snapshot)
            self.spare = next((state for old, state in forgotten.items() if old not in self.sending), self.spare)

    # --- quiet ---

    def wait_until_quiet(self, seconds: float) -> None:
        """Wait until nothing runs here that belongs to a step: what was abandoned might still draw random numbers."""
        deadline = time.monotonic() + seconds
        while running := self._step_work():
            if time.monotonic() >= deadline:
                raise RpcTimeout(
                    f"run {self.run!r} cannot return to its last snapshot: after {seconds:g} s worker "
                    f"{self.agent.info.name!r} still serves {', '.join(running[:5])} of the step that was given up"
                )
            with blocking():
                time.sleep(_LOOK_SECONDS)

    def _step_work(self) -> list[str]:
        peers = self.agent.peers
        return [
            f"a {kind.__name__} of worker {session.member.name!r}"
            for session in (*peers.sessions(), *peers.orphaned())
            for kind, _ in session.served()
            if kind in _STEP_WORK
        ]


class Parts(Layer):
    """The parts of all runs on one agent, by the run's name. Put on an agent by the first run that comes to it."""

    def __init__(self) -> None:
        self.by_run: dict[str, Part] = {}
        self.waiting: dict[str, list[tuple[str, int]]] = {}  # what the driver of a run waits for
        # Runs that are driven from here, and who hears what members tell of them; None before the first step.
        self.driven: dict[str, Callable[[str, str, Snapshot], None] | None] = {}
        self.closed = False  # whether a run was closed here by its driver

    def waits(self) -> Sequence[tuple[str, int]]:
        """Workers whose return a run waits for."""
        return [wait for waits in list(self.waiting.values()) for wait in waits]


_installing = threading.Lock()


def parts_of(agent: Agent) -> Parts:
    """The parts of all runs on an agent."""
    found = agent.find_layer(Parts)
    if found is None:
        with _installing:
            found = agent.find_layer(Parts)
            if found is None:
                found = Parts()
                agent.install(found)
    return found


def part_of(agent: Agent, run: str) -> Part:
    """The part of one run on an agent; an empty one if it was just started."""
    return parts_of(agent).by_run.setdefault(run, Part(run, agent))


def not_restored(agent: Agent, run: str, name: str) -> NotRestored:
    """The error for a durable value that cannot be used now."""
    return NotRestored(
        f"durable value {name!r} of run {run!r} is not available on worker {agent.info.name!r} now: the worker was "
        "started "
        "again, or the run is returning to its last snapshot. Inside `run.step()` the step runs again by itself",
        worker=agent.info.name,
        incarnation=agent.member.incarnation,
    )
