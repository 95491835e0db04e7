"""A thread that waits spins where that pays, and rests where it would disturb."""

from types import SimpleNamespace

import pytest

from telegrad.rpc.threads import spin
from telegrad.rpc.threads.spin import Spinner


class Idle:
    """I/O threads without work."""

    working = 0


class Waits:
    """A wait that ends after some looks, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.spent = 0.0
        self.others_work = False
        self.looks = 0
        monkeypatch.setattr(spin, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(spin, "_spent_by_others", lambda: self.spent)

    def look(self, seconds: float) -> bool:
        self.looks += 1
        self.now += 1e-6
        self.spent += 1e-6 * self.others_work
        return self.looks > self.needed

    def run(self, spinner: Spinner, needed: int) -> bool:
        """One wait that is over after so many microseconds."""
        self.looks, self.needed = 0, needed
        return spinner.wait(self.look, Idle())


def test_what_comes_soon_is_waited_for_without_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, spinner = Waits(monkeypatch), Spinner()
    assert all(waits.run(spinner, 50) for _ in range(100))
    assert all(waits.run(spinner, 90) for _ in range(100))


def test_waits_that_get_longer_are_followed_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, spinner = Waits(monkeypatch), Spinner()
    long = int(0.9 * spin.LIMIT * 1e6)
    assert waits.run(spinner, long) is False
    assert any(waits.run(spinner, long) for _ in range(40))
    assert waits.run(spinner, long)


def test_what_takes_too_long_is_slept_through_but_for_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, spinner = Waits(monkeypatch), Spinner()
    for _ in range(60):
        waits.run(spinner, 10**9)
    looks = 0
    for _ in range(spin._PROBE_EVERY):
        waits.run(spinner, 10**9)
        looks += waits.looks > 1
    assert looks == 1


def test_a_thread_does_not_spin_beside_others_of_its_process_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, spinner = Waits(monkeypatch), Spinner()
    waits.others_work = True
    spun = 0
    for _ in range(1000):
        waits.run(spinner, 60)
        spun += waits.looks > 1
    assert spun < 50
    waits.others_work = False
    for _ in range(2 * spin._LONG_REST):
        waits.run(spinner, 60)
    assert all(waits.run(spinner, 60) for _ in range(100))


def test_a_short_interruption_is_not_taken_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, spinner = Waits(monkeypatch), Spinner()
    for number in range(1000):
        waits.others_work = number % 16 == 7  # as the timer works, now and then
        assert waits.run(spinner, 60)


def test_it_stops_when_an_io_thread_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, spinner = Waits(monkeypatch), Spinner()
    waits.looks, waits.needed = 0, 60

    class Busy:
        working = 1

    assert spinner.wait(waits.look, Busy()) is False
    assert waits.looks == 1
