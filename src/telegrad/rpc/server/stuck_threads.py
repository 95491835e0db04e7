"""Looks after the threads that serve: one that is stuck in a user's function gives up its session, a pool in which
nothing moves gets one more thread, and callers are told when all threads are taken.
"""

import logging
import time
from collections.abc import Callable

from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.session import Session
from telegrad.wire.messages import Exhausted

log = logging.getLogger("telegrad.rpc")

_LOOK_SECONDS = 0.002
_MOST_SECONDS = 0.008  # between looks while requests come and go: each takes the interpreter from whoever serves
_QUIET_LOOKS = 25  # looks without activity after which it rests
_STUCK_LOOKS = 10  # looks without progress after which there is one more thread


class StuckThreads:
    """The timer's look at the sessions of one agent, while any is being served."""

    def __init__(self, runtime: Runtime, sessions: Callable[[], list[Session]]) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._looking = False
        self._pause = _LOOK_SECONDS
        self._quiet = 0
        self._stuck = 0
        self._handled = 0
        self._was_full = False

    def wake(self) -> None:
        """A session is being served, and says so itself: look for a while. Called by many threads; a race costs one
        more look."""
        if not self._looking:
            self._looking = True
            self._quiet = 0
            self._pause = _LOOK_SECONDS
            self._runtime.timer.at(time.monotonic() + _LOOK_SECONDS, self._look)

    def _look(self) -> None:
        io_threads = self._runtime.io_threads
        progress = io_threads.handled != self._handled
        self._handled = io_threads.handled
        found = [session.relieve() for session in self._sessions()]
        served = found.count(None) < len(found)
        self._stuck = 0 if progress or not io_threads.exhausted else self._stuck + 1
        if self._stuck >= _STUCK_LOOKS:
            self._stuck = 0
            io_threads.relieve()
        self._quiet = 0 if progress or served or io_threads.exhausted else self._quiet + 1
        if self._quiet < _QUIET_LOOKS:
            calm = served and True not in found and not io_threads.exhausted
            self._pause = min(2 * self._pause, _MOST_SECONDS) if calm else _LOOK_SECONDS
            self._runtime.timer.at(time.monotonic() + self._pause, self._look)
        else:
            self._looking = False
            # One that began after it was looked at above may have found that this goes on, and woken nobody.
            if any(session.relieve() is not None for session in self._sessions()):
                self.wake()

    def start(self) -> None:
        """Tell callers from now on, twice in each heartbeat, when no thread is left for what they ask."""
        heartbeat = self._runtime.options.heartbeat
        if heartbeat > 0 and not self._runtime.closing:
            self._tell_callers()
            self._runtime.timer.at(time.monotonic() + heartbeat / 2, self.start)

    def _tell_callers(self) -> None:
        full = self._runtime.io_threads.full
        if full and not self._was_full:
            log.warning(
                "all %d threads of worker %r run what others asked; further requests wait. Calls in a "
                "circle? `telegrad.observe.explain()` shows them; `async def` functions need no thread",
                full,
                self._runtime.info.name,
            )
        self._was_full = bool(full)
        for session in self._sessions():
            if full or session.paused:
                session.mention(Exhausted(full, session.running if session.paused else 0))
