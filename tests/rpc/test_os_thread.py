"""A thread has ended when the system has let go of it, which may be later than when it left Python."""

import ctypes
import threading

from telegrad.rpc.threads import os_thread


def _start_one_that_lingers(microseconds: int) -> threading.Thread:
    """A thread that sleeps in C after it has left Python, as one does that frees what a C++ library keeps for it."""
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0
    thread = threading.Thread(target=lambda: libc.pthread_setspecific(key, ctypes.c_void_p(microseconds)))
    thread.start()
    return thread


def test_the_end_of_a_thread_is_waited_for() -> None:
    thread = _start_one_that_lingers(200_000)
    assert os_thread.join(thread, 10)
    assert not os_thread.exists(thread)


def test_not_longer_than_asked_for() -> None:
    thread = _start_one_that_lingers(900_000)
    assert not os_thread.join(thread, 0.01)
    assert os_thread.exists(thread)
    assert os_thread.join(thread, 10)
