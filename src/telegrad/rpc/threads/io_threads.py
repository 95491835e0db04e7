"""The I/O threads: those of one agent that wait for its connections and run what arrives.

All of them wait on one epoll descriptor. A connection is armed for one event at a time, so the kernel itself picks the
thread that handles it and nobody hands anything over. At least one thread is always left waiting: when the last one is
taken by an event, another joins, up to the limit, above which only sleeping threads do not count.

A task wakes one thread, not all that are idle: each of them would want the interpreter, to find nothing.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from telegrad.rpc.threads import os_thread

log = logging.getLogger("telegrad.rpc")

ONCE = select.EPOLLIN | select.EPOLLONESHOT
END_ONLY = select.EPOLLRDHUP  # not armed: nothing but the end of the stream
_IDLE_SECONDS = 10.0
_KEEP_IDLE = 2
_MOMENT = 0.1  # for what is handled without user code, with much to spare
_STEP = 0.005
_MOST_THREADS = 1024  # with those that wait for others; beyond, requests wait in their sockets


class IoThreads:
    """Threads that handle events of descriptors and tasks submitted from anywhere."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = max(2, limit)
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Held to use it: closed meanwhile, its number could be another's. A reference that is collected, in the middle
        # of anything, submits a task: so no other lock will do, nor one that the same thread cannot take twice.
        self._waking = threading.RLock()
        self._epoll.register(self._wakeup, select.EPOLLIN | select.EPOLLET)  # one event for each time it is written
        self._handlers: dict[int, Callable[[], None]] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self.working = 0  # threads that are handling something, and not waiting meanwhile
        self._closed = False
        self.handled = 0  # events and tasks, for the timer to see whether there is progress

    def start(self) -> None:
        """Start the first threads."""
        for _ in range(_KEEP_IDLE):
            self._hire()

    # --- descriptors ---

    def register(self, fd: int, handler: Callable[[], None], *, armed: bool) -> None:
        """Call `handler` in an I/O thread when `fd` is readable, once for each time it is armed."""
        self._handlers[fd] = handler
        self._epoll.register(fd, ONCE if armed else END_ONLY)

    def arm(self, fd: int) -> None:
        """Wait for the next event of `fd`."""
        try:
            self._epoll.modify(fd, ONCE)
        except (FileNotFoundError, ValueError, OSError):
            pass  # closed meanwhile: whoever closed it has dealt with its end

    def stand_by(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` when `fd` is armed and readable, or nudged; until then somebody else watches it."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLONESHOT)

    def disarm(self, fd: int) -> None:
        """A thread is reading `fd` itself, or nothing is expected: call the handler for the end of the stream only."""
        try:
            self._epoll.modify(fd, END_ONLY)
        except (FileNotFoundError, ValueError, OSError):
            pass

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; to be called before it is closed."""
        self._handlers.pop(fd, None)
        try:
            self._epoll.unregister(fd)
        except (FileNotFoundError, ValueError, OSError):
            pass

    def nudge(self, fd: int) -> None:
        """Call the handler of `fd` soon, as if it were readable. A handler looks for itself, so one too many does no
        harm."""
        handler = self._handlers.get(fd)
        if handler is not None:
            self.submit(handler)

    # --- tasks ---

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` in an I/O thread."""
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def attend(self, task: Callable[[], None]) -> None:
        """The same for what must not wait until a user's function is done, as it would if all threads are taken."""
        if self._idle == 0 and not self._closed:
            threading.Thread(target=self._guard, args=(task,), name=f"{self._name}-attendant", daemon=True).start()
        else:
            self.submit(task)

    # --- threads ---

    def sleeping(self, change: int) -> None:
        """An I/O thread begins (+1) or ends (-1) to wait for somebody else."""
        with self._lock:
            self.working -= change
            short = change > 0 and self._idle == 0
        if short:
            self._hire()

    def relieve(self) -> None:
        """Add a thread although the limit is reached: for the timer, when nothing moves."""
        with self._lock:
            needed = self._idle == 0 and not self._closed
        if needed:
            self._hire(beyond=True)

    @property
    def exhausted(self) -> bool:
        """Whether no thread is left to take the next event."""
        return self._idle == 0

    @property
    def full(self) -> int:
        """How many threads there are, if all are taken and no more may join; else 0."""
        return len(self._threads) if self._idle == 0 and len(self._threads) >= _MOST_THREADS else 0

    def _hire(self, beyond: bool = False) -> None:
        with self._lock:
            if self._closed or len(self._threads) >= _MOST_THREADS or (not beyond and self.working > self._limit):
                return
            thread = threading.Thread(target=self._work, name=f"{self._name}-io", daemon=True)
            self._threads.add(thread)
            self._idle += 1
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more: those that there are go on
            with self._lock:
                self._idle -= 1
                self._threads.discard(thread)
                none = not self._threads
            if none:
                raise
            # Python 3.12 starts none once a program ends, which is no news: a cluster may be open then.
            level = logging.DEBUG if "interpreter shutdown" in str(error) else logging.WARNING
            log.log(level, "%s could not start another I/O thread: %s", self._name, error)

    def _work(self) -> None:
        try:
            while self._wait_and_handle():
                pass
        finally:
            with self._lock:
                self.working -= 1
                self._threads.discard(threading.current_thread())

    def _wait_and_handle(self) -> bool:
        """One event, from idle to idle. False when this thread should end."""
        try:
            events = self._epoll.poll(_IDLE_SECONDS, 1)
        except (ValueError, OSError):  # the I/O threads were closed
            events = []
        with self._lock:
            self._idle -= 1
            self.working += 1
            if self._closed or (not events and self._idle >= _KEEP_IDLE):
                return False
            alone = self._idle == 0
        if events:
            if alone:
                self._hire()
            self.handled += 1
            self._handle(events[0][0])
        with self._lock:
            self._idle += 1
            self.working -= 1
        return True

    def _handle(self, fd: int) -> None:
        handler = self._run_task if fd == self._wakeup else self._handlers.get(fd)
        if handler is not None:
            self._guard(handler)

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:
            log.exception("an I/O thread of %s met an unexpected error; it goes on", self._name)

    def _run_task(self) -> None:
        try:
            task = self._tasks.popleft()
        except IndexError:  # another thread has it
            return
        if self._tasks:  # two that came at once may have woken one thread
            self._wake()
        task()

    def close(self, timeout: float = 1.0) -> None:
        """Stop handling events and wait for the threads; for those that handle something, only a moment.

        One that is still on its way out when the interpreter ends can take the process down with it: if it holds the
        lock of stderr, or is inside a C++ function that let go of the GIL. One in a user's function cannot be ended.
        """
        with self._lock, self._waking:
            self._closed = True  # from here on nobody else uses the wake-up, which stays set
            threads = list(self._threads)
            self._epoll.modify(self._wakeup, select.EPOLLIN)  # for all threads, not for one
            os.eventfd_write(self._wakeup, 1)
        here = threading.current_thread()
        began = time.monotonic()
        for thread in threads:
            if thread is here:
                continue
            while not os_thread.join(thread, _STEP):
                taken = self.working and not self._idle  # all that are left
                if time.monotonic() - began >= (_MOMENT if taken else timeout):
                    break
        self._handlers.clear()
        self._epoll.close()
        os.close(self._wakeup)
