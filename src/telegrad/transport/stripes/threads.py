"""Threads that read and write the parts of large messages, as many as are busy at a time.

A part may have to wait for its peer, and the parts that are read must not wait behind those that are written: two
workers that send to each other would wait for ever. So there is no limit but the number of streams, and a thread that
finds nothing to do for a while ends.
"""

import queue
import threading
from collections.abc import Callable

_IDLE_SECONDS = 10.0

Task = Callable[[], None]


class PartThreads:
    """Runs each task at once, in a thread that is free or a new one. A task handles its own errors."""

    def __init__(self, name: str) -> None:
        self._name = f"{name}-part"
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait, less the tasks that wait for them
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def run(self, task: Task) -> None:
        """Have a task run now. RuntimeError once the worker has ended."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads for large messages have ended with their worker")
            self._idle -= 1
            if self._idle >= 0:
                self._tasks.put(task)
                return
            self._idle = 0
            new = threading.Thread(target=self._work, args=(task,), name=self._name, daemon=True)
            new.start()  # under the lock: `close` waits for threads, which it cannot for one that has yet to start
            self._threads.add(new)

    def _work(self, task: Task | None) -> None:
        while task is not None:
            task()
            with self._lock:
                self._idle += 1
            del task  # it holds the memory of a message
            task = self._next()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Task | None:
        try:
            return self._tasks.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:
            if self._idle > 0:  # nobody counts on this thread
                self._idle -= 1
                return None
        return self._tasks.get()  # a task was given out for it this very moment

    def close(self) -> None:
        """End the threads. Their connections have been closed, so none waits for a peer."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
