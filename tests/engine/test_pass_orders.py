"""A backward pass over two and three workers through every order of its messages, with a death at every moment.

Passes, services and contexts are real; the agents under them only queue what is to be sent (`queued_agent.py`), and the
test moves it on, one message at a time. Requests to a worker arrive in their order, and so do its replies; all else is
free: two workers, the deaths and who hears of them when. The root waits as it always does, and the world goes on inside
its wait.

Whatever the order: the root gets the right gradients, or a `WorkerDied` that names the dead; nobody else waits for
anything afterwards; and after the end of the context nobody remembers it.
"""

from collections import deque
from collections.abc import Callable, Hashable
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.context import Context
from telegrad.autograd.functions import SendNode, attach_recv
from telegrad.autograd.registry import Registry
from telegrad.engine.cleanup import end_context
from telegrad.engine.passes import Roots
from telegrad.engine.root_pass import RootPass
from telegrad.engine.service import PassService
from telegrad.errors import WorkerDied
from telegrad.ids import ContextId
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.request import Request
from telegrad.rpc.threads.wakeup import Wakeup
from telegrad.rpc.workers import Member
from tests.engine.queued_agent import QueuedAgent, QueuedRequest
from tests.exploring import Chance, SeenBefore, explore


class RootDied(BaseException):
    """Ends the thread that waits for the pass, as the death of its process would."""


class Worker(QueuedAgent):
    """One worker, which may die."""

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(world, number)
        self.world = world
        self.name = self.member.name
        self.alive = True
        self.tasks = self.io_threads.tasks  # what its I/O threads have yet to do
        self.registry, self.service = self.layer(Registry), self.layer(PassService)
        self.weight = torch.tensor([2.0 + number], requires_grad=True)

    @property
    def context(self) -> Context:
        return self.registry.join(self.world.context_id)


class Step(Wakeup):
    """Whoever waits for a wake-up lets the world take one step, and looks again."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def wait(self, seconds: float) -> None:
        self._world.step()


class World:
    """Workers, what is on its way between them, and what can happen next."""

    def __init__(self, chance: Chance, size: int, victim: str | None) -> None:
        self.chance = chance
        self.streams: dict[tuple[str, str, str], deque[tuple[Any, ...]]] = {}
        self.workers = [Worker(self, number) for number in range(size)]
        for worker in self.workers:
            worker.directory.update([other.member for other in self.workers])
        self.root = self.workers[0]
        self.victim = next((worker for worker in self.workers if worker.name == victim), None)
        self.context_id: ContextId = self.root.registry.open().context_id
        self.late_calls: deque[Callable[[], None]] = deque()  # messages of calls that have yet to arrive
        self.position = ""  # where the root waits
        self.gone_on = 0  # how often something happened while it waited inside an engine call
        self.over: BaseException | None = None  # why the test does not follow this world any further
        self.pass_: RootPass | None = None
        for worker in self.workers:
            assert worker.context.context_id == self.context_id

    # --- the forward pass ---

    def carry(self, sender: Worker, receiver: Worker, value: Tensor) -> Tensor:
        """What a message does to a tensor: a Send here, a Recv there."""
        message_id = sender.registry.next_message_id()
        sender.context.participants.add(receiver.member.worker_id)
        sender.context.add_send(SendNode(message_id, receiver.member.worker_id, [value]))
        receiver.context.participants.add(sender.member.worker_id)
        ((arrived,), recv) = attach_recv([value.detach().clone()], message_id, sender.member.worker_id)
        receiver.context.add_recv(recv)
        return arrived

    def send_late(self, sender: Worker, receiver: Worker, value: Tensor) -> None:
        """A call whose message is still on its way when the pass begins; nobody waits for its result."""
        message_id = sender.registry.next_message_id()
        sender.context.participants.add(receiver.member.worker_id)
        sender.context.add_send(SendNode(message_id, receiver.member.worker_id, [value]))
        here = sender.member.worker_id

        def arrive() -> None:
            if receiver.alive and (context := receiver.registry.get(self.context_id)) is not None:
                context.arrived(message_id, here)

        self.late_calls.append(arrive)

    # --- what can happen ---

    def put(self, kind: str, sender: QueuedAgent, receiver: Member, content: tuple[Any, ...]) -> None:
        if self.workers[sender.member.worker_id].alive and self.workers[receiver.worker_id].alive:
            self.streams.setdefault((kind, sender.member.name, receiver.name), deque()).append(content)

    def events(self) -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[[], None]] = {}
        by_name = {worker.name: worker for worker in self.workers}
        for (kind, sender, receiver), stream in self.streams.items():
            if stream and by_name[receiver].alive and sender not in by_name[receiver].heard_dead:
                found[f"{kind} {sender} to {receiver}"] = self._delivery(
                    kind, by_name[sender], by_name[receiver], stream
                )
        for worker in self.workers:
            if worker.alive and worker.tasks:
                found[f"a task of {worker.name}"] = lambda worker=worker: worker.tasks.popleft()()
        if self.late_calls:
            found["late call"] = self.late_call
        if self.victim is not None and self.victim.alive:
            found[f"{self.victim.name} dies"] = self.die
        elif self.victim is not None:
            dead = self.victim.member
            for worker in self.workers:
                if worker.alive and dead.name not in worker.heard_dead:
                    found[f"{worker.name} hears"] = lambda worker=worker: worker.hear_of_death(dead)
        return found

    @staticmethod
    def _delivery(kind: str, sender: Worker, receiver: Worker, stream: deque[tuple[Any, ...]]) -> Callable[[], None]:
        take = receiver.take_request if kind == "request" else receiver.take_reply
        return lambda: take(sender.member, *stream.popleft())

    def late_call(self) -> None:
        self.late_calls.popleft()()

    def die(self) -> None:
        assert self.victim is not None
        self.victim.alive = False
        for (_, _, receiver), stream in self.streams.items():
            if receiver == self.victim.name:
                stream.clear()
        if self.victim is self.root and self.position:
            raise RootDied

    def step(self) -> None:
        found = self.events()
        try:
            assert found, f"the root waits for {self.position}, and nothing more will happen"
            self.chance.seen(self.state())
        except (AssertionError, SeenBefore) as error:
            self.over = error  # the root may take it for an error of the pass, and raise another
            raise
        found[self.chance.choose(list(found))]()

    def wait_for_more(self, more: Wakeup, seconds: float) -> bool:
        """The root waits inside an engine call: for any time."""
        position, self.position = self.position, "what follows"
        try:
            if self.chance.choose(["it waits", "it has waited long enough"]) == "it waits":
                self.step()
                self.gone_on += 1
                return True
            return False
        finally:
            self.position = position

    def until_done(self, slot: Slot) -> None:
        while not slot.done:
            self.step()

    def drain(self) -> None:
        """What is left after the root has returned, in two orders: the pass can only be forgotten any more."""
        self.chance.seen(self.state())
        end = self.chance.choose(["the rest", "the rest, backwards"])
        while found := self.events():
            name = list(found)[0 if end == "the rest" else -1]
            self.chance.story.append(name)
            found[name]()

    def backward(self, root: Tensor) -> BaseException | None:
        """The pass, from the worker that starts it; the error it ends with."""
        self.position = "the pass"
        try:
            self.pass_ = pass_ = self.root.service.open(self.root.context, False, 600.0)
            pass_.new_wakeup = lambda: Step(self)
            pass_.stages_from, pass_.patience = 0, 60.0
            pass_.wait_for_more = self.wait_for_more  # type: ignore[method-assign] # with a world that goes on meanwhile
            pass_.begin(roots=Roots((get_gradient_edge(root),), [torch.ones_like(root)]))
            pass_.wait()
            return None
        except BaseException as error:
            if self.over is not None:
                raise self.over from None
            return error
        finally:
            self.position = ""

    def state(self) -> Hashable:
        """All that decides what can happen from here on."""
        root = self.pass_
        return (
            self.position,
            frozenset((key, tuple(map(_show, stream))) for key, stream in self.streams.items() if stream),
            tuple(self._state_of(worker) for worker in self.workers),
            len(self.late_calls),
            root and root.progress(),
        )

    def _state_of(self, worker: Worker) -> Hashable:
        context = worker.registry.get(self.context_id)
        passes = tuple((_kind(p.error), p.progress()) for p in worker.service.passes())
        knows = context and (frozenset(context.participants), _kind(context.failure), len(context.orphans))
        tasks = tuple(task.__qualname__ for task in worker.tasks if isinstance(task, FunctionType | MethodType))
        return worker.alive, frozenset(worker.heard_dead), knows, passes, len(worker.tasks), tasks


def _show(content: tuple[Any, ...]) -> Hashable:
    return tuple(repr(part) for part in content if not isinstance(part, Slot | list))


def _kind(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__} {getattr(error, 'worker', '')}"


# --- scenarios: the root tensor, and what each worker's weight and the input must get ---

Forward = Callable[[World, Tensor], tuple[Tensor, dict[str, float]]]


def there_and_back(world: World, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    w0, w1 = world.workers[:2]
    y = world.carry(w1, w0, world.carry(w0, w1, x) * w1.weight)
    return y * w0.weight, {"x": 6.0, "w0": 3.0, "w1": 2.0}


def through_a_third(world: World, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    w0, w1, w2 = world.workers
    inner = world.carry(w2, w1, world.carry(w1, w2, world.carry(w0, w1, x)) * w2.weight)
    w0.context.touch({w2.member.worker_id})
    return world.carry(w1, w0, inner * w1.weight), {"x": 12.0, "w1": 4.0, "w2": 3.0}


def one_is_unused(world: World, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    w0, _, w2 = world.workers
    world.carry(w2, w0, world.carry(w0, w2, x) * w2.weight)
    return there_and_back(world, x)


def root_does_not_know_one(world: World, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    w0, w1, w2 = world.workers
    arrived = world.carry(w0, w1, x)
    kept = world.carry(w2, w1, world.carry(w1, w2, arrived) * w2.weight)
    return world.carry(w1, w0, kept * w1.weight), {"x": 12.0, "w1": 4.0, "w2": 3.0}


def a_ring(world: World, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    w0, w1, w2 = world.workers
    y = world.carry(w1, w2, world.carry(w0, w1, x) * w1.weight)
    w0.context.touch({w2.member.worker_id})
    return world.carry(w2, w0, y * w2.weight), {"x": 12.0, "w1": 4.0, "w2": 3.0}


def a_late_call(world: World, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    w0, w1 = world.workers[:2]
    found = there_and_back(world, x)
    world.send_late(w0, w1, x * w0.weight)
    return found


def a_loop(world: World, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Two calls, one after the other, each with what the one before returned and with its own input added."""
    w0, w1 = world.workers[:2]
    first = x * w0.weight
    second = first + world.carry(w1, w0, world.carry(w0, w1, first) * w1.weight)
    third = second + world.carry(w1, w0, world.carry(w0, w1, second) * w1.weight)
    return third, {"x": 32.0, "w0": 16.0, "w1": 16.0}


SCENARIOS: dict[str, tuple[Forward, int]] = {
    "there and back": (there_and_back, 2),
    "through a third": (through_a_third, 3),
    "one is unused": (one_is_unused, 3),
    "the root does not know one": (root_does_not_know_one, 3),
    "a ring": (a_ring, 3),
    "a late call": (a_late_call, 2),
    "a loop": (a_loop, 2),
}

# What a pass asks of its agent.
ASKED = [(QueuedAgent, Agent, name) for name in ("send", "notify", "reply_frame", "reply_tensors")]
ASKED += [(QueuedRequest, Request, name) for name in ("take_tensors", "reply", "fail")]


@pytest.mark.parametrize(("here", "real", "name"), ASKED)
def test_agents_here_are_asked_as_real_ones_are(here: Any, real: Any, name: str) -> None:
    here, real = dict(signature(getattr(here, name)).parameters), dict(signature(getattr(real, name)).parameters)
    here.pop("self", None)
    real.pop("self", None)
    positional = [parameter for parameter in real.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert [parameter.name for parameter in positional] == [
        parameter.name for parameter in here.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert set(real) <= set(here) or any(parameter.kind is parameter.VAR_KEYWORD for parameter in here.values())


CASES = [(name, victim) for name, (_, size) in SCENARIOS.items() for victim in (None, *(f"w{i}" for i in range(size)))]
MOST_ORDERS = [("a ring", "w1"), ("a ring", "w2"), ("through a third", "w1")]


@pytest.mark.slow
@pytest.mark.timeout(300)  # it takes seconds, but a machine may be busy
@pytest.mark.parametrize(
    ("name", "victim"),
    [
        pytest.param(
            *case, id=f"{case[0]}, {case[1] or 'nobody'} dies", marks=[pytest.mark.long] * (case in MOST_ORDERS)
        )
        for case in CASES
    ],
)
def test_every_order(name: str, victim: str | None) -> None:
    forward, size = SCENARIOS[name]

    waited = 0

    def run(chance: Chance) -> None:
        nonlocal waited
        world = World(chance, size, victim)
        x = torch.ones(1, requires_grad=True)
        root, expected = forward(world, x)
        error = world.backward(root)
        waited += world.gone_on
        world.drain()
        check(world, x, expected, error)

    assert explore(run) > 0
    assert (waited > 0) == (name == "a loop")


def check(world: World, x: Tensor, expected: dict[str, float], error: BaseException | None) -> None:
    dead = world.victim if world.victim is not None and not world.victim.alive else None
    if error is None:
        if world.root.alive:  # else its context has ended everywhere
            check_gradients(world, x, expected)
    elif not isinstance(error, RootDied):
        assert dead is not None, f"nobody died, and yet: {error!r}"
        assert isinstance(error, WorkerDied), repr(error)
        assert error.worker == dead.name, repr(error)
    survivors = [worker for worker in world.workers if worker.alive]
    for worker in survivors:
        for pass_ in worker.service.passes():
            assert pass_.finished, f"{worker.name} still waits: {pass_}"
        assert not any(worker.asked.values()), f"{worker.name} has asked, and heard nothing"
    if world.root.alive:
        end_context(world.root.service, world.context_id)
        world.chance = Chance((), set())
        world.drain()
    for worker in survivors:
        assert worker.registry.get(world.context_id) is None, f"{worker.name} remembers the context"
        assert worker.service.passes() == []


def check_gradients(world: World, x: Tensor, expected: dict[str, float]) -> None:
    leaves = {"x": (world.root, x)} | {worker.name: (worker, worker.weight) for worker in world.workers}
    for name, (worker, leaf) in leaves.items():
        if worker.alive:
            gradient = worker.context.gradients.get(leaf)
            found = None if gradient is None else gradient.item()
            assert found == expected.get(name), f"{name} has {found}"
