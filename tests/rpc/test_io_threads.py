"""The I/O threads end while others still hand them tasks."""

import os
import threading

import pytest

from telegrad.rpc.threads import io_threads
from telegrad.rpc.threads.io_threads import IoThreads
from tests.waiting import wait_until


def test_a_task_that_comes_with_the_end_writes_to_no_descriptor_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = IoThreads("test", 2)
    threads.start()
    ending = threading.Thread(target=threads.close)
    write = os.eventfd_write
    was_open: list[bool] = []

    def write_late(fd: int, value: int) -> None:
        """The agent is closed by another thread at this very moment."""
        if not was_open:
            was_open.append(False)
            ending.start()
            ending.join(0.2)
            was_open[0] = os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]"
        write(fd, value)

    monkeypatch.setattr(io_threads.os, "eventfd_write", write_late)
    threads.submit(lambda: None)
    ending.join(60)
    assert was_open == [True]
    threads.submit(lambda: None)


def test_all_tasks_run() -> None:
    threads = IoThreads("test", 2)
    threads.start()
    done: list[int] = []
    for number in range(100):
        threads.submit(lambda number=number: done.append(number))
    wait_until(lambda: len(done) == 100)
    threads.close()
    assert sorted(done) == list(range(100))


def test_a_task_wakes_one_thread_and_the_end_wakes_all() -> None:
    threads = IoThreads("test", 8)
    threads.start()
    go = threading.Event()
    for _ in range(6):
        threads.submit(go.wait)
    wait_until(lambda: threads.working == 6)
    go.set()
    wait_until(lambda: threads.working == 0)
    idle, before = len(threads._threads), threads.handled
    assert idle >= 6
    for _ in range(50):
        done = threading.Event()
        threads.submit(done.set)
        assert done.wait(60)
    wait_until(lambda: threads.working == 0)
    assert threads.handled == before + 50
    threads.close()
    wait_until(lambda: not threads._threads)


@pytest.mark.parametrize(("why", "warns"), [("", True), (" at interpreter shutdown", False)])
def test_no_task_is_left_where_no_thread_can_be_started(
    why: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = IoThreads("test", 8)
    threads.start()
    started, come, go = threading.Event(), threading.Event(), threading.Event()
    threads.submit(go.wait)
    wait_until(lambda: threads.working == 1)

    def fail(thread: threading.Thread) -> None:
        come.set()
        raise RuntimeError(f"can't start new thread{why}")

    monkeypatch.setattr(threading.Thread, "start", fail)
    threads.submit(started.set)
    assert come.wait(60), "the last idle thread is taken, and another is to join"
    assert started.wait(60), "and though it cannot, the task runs"
    go.set()
    wait_until(lambda: threads.working == 0)
    for _ in range(3):
        done = threading.Event()
        threads.submit(done.set)
        assert done.wait(60)
    monkeypatch.undo()
    assert any("could not start another" in record.getMessage() for record in caplog.records) is warns
    threads.close()
    wait_until(lambda: not threads._threads)


def test_many_threads_submit_at_once_and_no_task_is_left() -> None:
    threads = IoThreads("test", 4)
    threads.start()
    done: list[int] = []

    def submit() -> None:
        for number in range(2000):
            threads.submit(lambda number=number: done.append(number))

    submitting = [threading.Thread(target=submit) for _ in range(4)]
    for thread in submitting:
        thread.start()
    for thread in submitting:
        thread.join(60)
    wait_until(lambda: len(done) == 8000)
    threads.close()
