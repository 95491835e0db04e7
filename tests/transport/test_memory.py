"""The listener of the memory transport, as those see it who wait on it."""

import select

import pytest

from telegrad.transport.memory import MemoryListener, dial_memory


def test_whoever_accepts_one_of_two_is_told_of_the_other() -> None:
    listener = MemoryListener()
    try:
        with dial_memory(listener.name), dial_memory(listener.name):
            for _ in range(2):
                assert select.select([listener], [], [], 0)[0]
                listener.accept()[0].close()
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert not select.select([listener], [], [], 0)[0]
    finally:
        listener.close()
