"""What the timer looks after: nothing is held back for longer than was asked, and its thread is not woken in vain."""

import heapq
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.rpc.server import stuck_threads
from telegrad.rpc.server.stuck_threads import StuckThreads
from telegrad.rpc.threads import delayed_flush
from telegrad.rpc.threads.delayed_flush import BURST, LAZY, DelayedFlush


class World:
    """A timer whose time a test makes pass."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = 0  # by anyone but a task of the timer itself: each of these wakes its thread
        self._tasks: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._running = False

    def monotonic(self) -> float:
        return self.now

    def at(self, when: float, task: Callable[[], None]) -> None:
        heapq.heappush(self._tasks, (when, next(self._order), task))
        self.asked += not self._running

    def wait(self, seconds: float) -> int:
        """How many tasks ran in that time."""
        end, ran = self.now + seconds, 0
        while self._tasks and self._tasks[0][0] <= end:
            self.now, _, task = heapq.heappop(self._tasks)
            self._running = True
            task()
            self._running = False
            ran += 1
        self.now = end
        return ran


class Held:
    """A connection that says when it was flushed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.flushed: list[float] = []

    def flush(self) -> None:
        self.flushed.append(self._world.now)

    def after_hold(self) -> None:
        pass

    before_flush = after_hold


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for module in (delayed_flush, stuck_threads):
        monkeypatch.setattr(module, "time", made)
    return made


def test_nothing_is_held_back_for_longer_than_was_asked(world: World) -> None:
    timer: Any = world
    flush, one, other = DelayedFlush(timer), Held(world), Held(world)
    for step in range(200):
        connection: Any = (one, other)[step % 2]
        seconds = BURST if step % 7 == 0 else LAZY
        asked = world.now
        flush.within(connection, seconds)
        world.wait(seconds)
        assert connection.flushed[-1] >= asked, "it was not looked at in time"
        world.wait(0.0007 * (step % 11))


def test_what_is_held_back_again_and_again_wakes_no_thread(world: World) -> None:
    timer: Any = world
    connection: Any = Held(world)
    flush = DelayedFlush(timer)
    for _ in range(1000):
        flush.within(connection, LAZY)
        world.wait(LAZY / 10)
    assert world.asked == 1
    assert len(connection.flushed) <= 101
    flush.within(connection, BURST)  # sooner than the next look, which stays the only one that goes on
    looks = 0
    for _ in range(1000):
        flush.within(connection, LAZY)
        looks += world.wait(LAZY / 10)
    assert looks <= 103
    world.wait(1.0)
    assert world.wait(1.0) == 0, "it looks though nothing is held back"


def test_a_stuck_thread_is_looked_for_less_often_while_none_is(world: World) -> None:
    stuck: list[bool | None] = [False]
    session = SimpleNamespace(relieve=lambda: stuck[0])
    pool = SimpleNamespace(handled=0, exhausted=False, relieve=lambda: None)
    runtime: Any = SimpleNamespace(timer=world, io_threads=pool)
    looks = StuckThreads(runtime, lambda: [session])  # type: ignore[list-item] # as much of one as it needs
    looks.wake()
    assert world.wait(0.1) < 16  # of 2 ms each it would be 50
    stuck[0] = True
    world.wait(0.01)
    assert world.wait(0.1) >= 49
    stuck[0] = None  # nobody serves: it rests after a while
    world.wait(1.0)
    assert world.wait(1.0) == 0


def test_one_that_begins_as_the_looks_end_is_looked_at(world: World) -> None:
    """Its thread is between two others: it serves by now, and has not been seen."""
    serves = False

    def relieve() -> bool | None:
        """Serves from the last look on, after which none would follow, and says so while that look goes on."""
        nonlocal serves
        seen = serves or None
        if looks._quiet == stuck_threads._QUIET_LOOKS - 1 and not serves:
            serves = True
            looks.wake()
        return seen

    session = SimpleNamespace(relieve=relieve)
    pool = SimpleNamespace(handled=0, exhausted=False, relieve=lambda: None)
    runtime: Any = SimpleNamespace(timer=world, io_threads=pool)
    looks = StuckThreads(runtime, lambda: [session])  # type: ignore[list-item] # as much of one as it needs
    looks.wake()
    world.wait(1.0)
    assert serves
    assert world.wait(0.1) > 0
