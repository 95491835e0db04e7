"""Copies by several threads: all bytes arrive, whoever helps, and nobody is waited for who has not begun."""

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from telegrad.transport.blocks import copying
from telegrad.transport.blocks.copying import ALONE_UP_TO, TORCH_FROM, Copier, Helpers
from tests.waiting import wait_until

SIZES = [0, 1, TORCH_FROM, TORCH_FROM + 5, ALONE_UP_TO, ALONE_UP_TO + 1, 5 * 2**20, 9 * 2**20 + 12_345]


@pytest.fixture(autouse=True)
def two_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with three cores, of which torch uses one in each worker."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})


class Memory:
    """Some bytes that differ from place to place, and room for as many."""

    def __init__(self, nbytes: int) -> None:
        self.source = (ctypes.c_uint8 * (nbytes + 1)).from_buffer(bytearray(bytes(range(251)) * (nbytes // 251 + 1)))
        self.target = (ctypes.c_uint8 * (nbytes + 1)).from_buffer(bytearray(nbytes + 1))
        self.nbytes = nbytes

    def copied_by(self, copier: Copier) -> bool:
        copier.copy(ctypes.addressof(self.target), ctypes.addressof(self.source), self.nbytes)
        same = bytes(self.target)[: self.nbytes] == bytes(self.source)[: self.nbytes]
        return same and self.target[self.nbytes] == 0


@pytest.fixture
def in_threads() -> Iterator[Callable[[Callable[[], None]], None]]:
    started: list[threading.Thread] = []

    def ask_for_help(work: Callable[[], None]) -> None:
        started.append(threading.Thread(target=work))
        started[-1].start()

    yield ask_for_help
    for each in started:
        each.join(10)


@pytest.mark.parametrize("nbytes", SIZES)
def test_all_bytes_arrive(nbytes: int, in_threads: Callable[[Callable[[], None]], None]) -> None:
    assert Memory(nbytes).copied_by(Copier(in_threads))
    assert Memory(nbytes).copied_by(Copier())


@pytest.mark.parametrize("nbytes", SIZES)
def test_torchs_threads_copy_where_it_has_several(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_for_help(_: object) -> None:
        pytest.fail("helpers are for where torch has one thread")

    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert Memory(nbytes).copied_by(Copier(ask_for_help))


def test_a_users_mode_sees_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    seen: list[object] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        assert Memory(2 * TORCH_FROM).copied_by(Copier())
    assert not seen


def test_help_that_comes_late_finds_nothing_to_do() -> None:
    asked: list[Callable[[], None]] = []
    memory = Memory(8 * 2**20)
    assert memory.copied_by(Copier(asked.append))
    memory.target[0] = 77
    for work in asked:
        work()
    assert len(asked) == 2
    assert memory.target[0] == 77


def test_who_has_begun_is_waited_for_and_the_next_copies_are_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, asked = threading.Event(), threading.Event(), []
    move, caller = ctypes.memmove, threading.current_thread()

    clock = itertools.count()  # a second between two looks at it: what was waited for was waited for long

    def slow_elsewhere(*args: int) -> None:
        if threading.current_thread() is not caller:
            begun.set()
            assert go_on.wait(60)
        move(*args)

    def now() -> float:
        if not go_on.is_set():  # the caller has made its last piece
            threading.Timer(0.05, go_on.set).start()
        return next(clock)

    def ask_for_help(work: Callable[[], None]) -> None:
        asked.append(work)
        if len(asked) == 1:
            threading.Thread(target=work, daemon=True).start()
            assert begun.wait(60)

    monkeypatch.setattr(copying.ctypes, "memmove", slow_elsewhere)
    monkeypatch.setattr(copying, "time", SimpleNamespace(perf_counter=now))
    copier = Copier(ask_for_help)
    assert Memory(5 * 2**20 + 1).copied_by(copier)
    assert len(asked) == 2
    assert Memory(5 * 2**20 + 1).copied_by(copier)
    assert len(asked) == 2


# --- the helpers ---


def copiers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "test-copier"]


def all_end() -> None:
    """Helpers that were closed end; `close` does not wait for long."""
    wait_until(lambda: not copiers())


def test_helpers_start_when_the_first_is_asked_and_end_with_close() -> None:
    helpers = Helpers("test")
    assert copiers() == []
    with closing(helpers):
        ran: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        for _ in range(10):
            helpers.ask(lambda: ran.put(threading.current_thread()))
        started = copiers()
        assert len(started) == 2
        assert {ran.get(timeout=60) for _ in range(10)} <= set(started)
    all_end()


def test_helpers_work_at_once() -> None:
    """Two at a time: each waits for the other here."""
    both = threading.Barrier(3)
    with closing(Helpers("test")) as helpers:
        for _ in range(2):
            helpers.ask(lambda: both.wait(60) and None)
        both.wait(60)
    all_end()


class Crowded:
    """A lock that as many threads have come to before one of them gets it."""

    def __init__(self, lock: Any, threads: int) -> None:
        self._lock = lock
        self._all_here = threading.Barrier(threads)

    def __enter__(self) -> None:
        self._all_here.wait(60)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_two_who_ask_first_start_the_helpers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Helpers("test")) as helpers:
        ran: queue.SimpleQueue[int] = queue.SimpleQueue()
        askers = [threading.Thread(target=helpers.ask, args=(lambda: ran.put(1),)) for _ in range(2)]
        with monkeypatch.context() as crowded:
            crowded.setattr(helpers, "_lock", Crowded(helpers._lock, len(askers)))
            for asker in askers:
                asker.start()
            for asker in askers:
                asker.join(60)
        assert sum(ran.get(timeout=60) for _ in askers) == 2
        assert len(copiers()) == 2
    all_end()


def test_helpers_that_nobody_asked_close_and_close_again() -> None:
    helpers = Helpers("test")
    helpers.close()
    helpers.close()
    assert copiers() == []


@pytest.mark.parametrize("begun", [True, False])
def test_who_asks_after_the_end_gets_no_help_and_leaves_nothing(begun: bool) -> None:
    """A connection may still be copying while its worker ends: it copies alone then."""
    helpers = Helpers("test")
    if begun:
        helpers.ask(lambda: None)
    helpers.close()
    copier = Copier(helpers.ask)
    for _ in range(3):
        assert Memory(5 * 2**20).copied_by(copier)
    all_end()
    assert helpers._tasks.empty()


def test_helpers_help_on_whatever_the_machine_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be bound to one core after its connections were made. What they ask for must not pile up."""
    done = threading.Event()
    with closing(Helpers("test")) as helpers:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
        helpers.ask(done.set)
        assert done.wait(60)
    all_end()


@pytest.mark.parametrize("nbytes", SIZES)
def test_all_bytes_arrive_with_helpers(nbytes: int) -> None:
    with closing(Helpers("test")) as helpers:
        copier = Copier(helpers.ask)
        for _ in range(5):
            assert Memory(nbytes).copied_by(copier)
    all_end()
