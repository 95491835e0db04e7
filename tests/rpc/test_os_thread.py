"""A thread has ended when the system has let go of it, which may be later than when it left Python."""

import ctypes
import threading

from telegrad.rpc.threads import os_thread
from tests.waiting import wait_until

_libc = ctypes.CDLL(None)


class Lingers:
    """A thread that waits in C after it has left Python, as one does that frees what a C++ library keeps for it."""

    def __init__(self) -> None:
        self._let_go = (ctypes.c_uint64 * 8)()  # room for a semaphore
        assert _libc.sem_init(self._let_go, 0, 0) == 0
        key = ctypes.c_uint()
        assert _libc.pthread_key_create(ctypes.byref(key), _libc.sem_wait) == 0
        semaphore = ctypes.c_void_p(ctypes.addressof(self._let_go))
        self.thread = threading.Thread(target=lambda: _libc.pthread_setspecific(key, semaphore))
        self.thread.start()
        wait_until(lambda: not self.thread.is_alive())

    def let_go(self) -> None:
        assert _libc.sem_post(self._let_go) == 0


def test_the_end_of_a_thread_is_waited_for() -> None:
    lingers, told = Lingers(), threading.Event()

    def end() -> None:
        told.set()
        lingers.let_go()

    threading.Timer(0.1, end).start()
    assert os_thread.join(lingers.thread, 60)
    assert told.is_set()
    assert not os_thread.exists(lingers.thread)


def test_not_longer_than_asked_for() -> None:
    lingers = Lingers()
    assert not os_thread.join(lingers.thread, 0.01)
    assert os_thread.exists(lingers.thread)
    lingers.let_go()
    assert os_thread.join(lingers.thread, 60)
