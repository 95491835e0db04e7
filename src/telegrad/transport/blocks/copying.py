"""A large copy by several threads, while there are cores for them.

Where torch has several threads in this process, they are at hand and make it. Where it has one, because workers share
the cores, other cores may still be idle: the copy is cut into pieces, and whoever is free takes the next one. The
caller takes pieces like the others and waits for nobody who has not begun: on a busy machine it does all of the work
itself. If it had to wait for another's last piece, the machine is busy, and the next copies are made alone.

The helpers are threads of their own, not those that serve requests: what a user's function leaves with its thread (the
memory it has touched, torch's own threads) is of use only if the next request is served by the same one.
"""

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable

import torch

ALONE_UP_TO = 4 * 2**20  # bytes that are copied before another thread would have woken
TORCH_FROM = 2**20  # bytes from which on waking torch's threads is worth it
_PIECE = 2**20
_MOST_HELPERS = 3  # a few cores take all the memory's bandwidth
_LONG = 0.5e-3  # a wait for one piece that shows that its thread lost its core
_REST = 32  # copies to make alone then

AskForHelp = Callable[[Callable[[], None]], None]


def most_helpers() -> int:
    """How many may help with one copy: none on a single core."""
    return min(len(os.sched_getaffinity(0)) - 1, _MOST_HELPERS)


class Copier:
    """Copies memory; `ask_for_help` has a function run in another thread, now or later, or never."""

    def __init__(self, ask_for_help: AskForHelp | None = None) -> None:
        self.ask_for_help = ask_for_help
        self._helpers = most_helpers()
        self._resting = 0

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from one address to another; returns when all is done."""
        if nbytes >= TORCH_FROM and torch.get_num_threads() > 1 and not _modes():
            _copy_with_torch(target, source, nbytes)
            return
        if nbytes <= ALONE_UP_TO or self.ask_for_help is None or self._resting:
            self._resting -= self._resting > 0
            ctypes.memmove(target, source, nbytes)  # releases the GIL
            return
        job = _Job(target, source, nbytes)
        turns = [threading.Lock() for _ in range(self._helpers)]
        for turn in turns:
            self.ask_for_help(lambda turn=turn: job.help(turn))  # type: ignore[misc] # mypy cannot type this form
        job.work()
        begun = time.perf_counter()
        for turn in turns:
            with turn:  # held by one who is still at it; who comes later finds nothing left to do
                pass
        if time.perf_counter() - begun > _LONG:
            self._resting = _REST


_WORD = 8


def _modes() -> int:
    """How many of a user's modes would be asked about each operation of this thread."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()


def _copy_with_torch(target: int, source: int, nbytes: int) -> None:
    words = nbytes // _WORD
    array = ctypes.c_int64 * words
    to, origin = (torch.frombuffer(array.from_address(at), dtype=torch.int64) for at in (target, source))
    to.copy_(origin)
    done = words * _WORD
    if done < nbytes:
        ctypes.memmove(target + done, source + done, nbytes - done)


class _Job:
    """One copy that is under way."""

    __slots__ = ("_nbytes", "_offsets", "_source", "_target")

    def __init__(self, target: int, source: int, nbytes: int) -> None:
        self._target = target
        self._source = source
        self._nbytes = nbytes
        self._offsets = iter(range(0, nbytes, _PIECE))  # each `next` is one step under the GIL: no piece is taken twice

    def work(self) -> None:
        """Copy pieces until none is left to take."""
        for offset in self._offsets:
            size = min(_PIECE, self._nbytes - offset)
            ctypes.memmove(self._target + offset, self._source + offset, size)

    def help(self, turn: threading.Lock) -> None:
        """The same in another thread, under a lock that tells the caller when this one has finished its last piece."""
        with turn:
            self.work()


class Helpers:
    """Threads that help with copies, started when the first one is asked for."""

    def __init__(self, name: str) -> None:
        self._name = f"{name}-copier"
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, task: Callable[[], None]) -> None:
        """Have a task run soon; never, once they are closed."""
        if self._closed:
            return
        if not self._threads:
            self._start()
        self._tasks.put(task)

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            count = max(1, most_helpers())  # whoever asks may have counted when there were more cores
            self._threads = [threading.Thread(target=self._work, name=self._name, daemon=True) for _ in range(count)]
            for thread in self._threads:
                thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join(1.0)
