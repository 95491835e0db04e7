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
