"""A runtime in which nothing happens by itself: no thread, no timer. Tests do what the threads would, in any order."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from telegrad.ids import WorkerId
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.outcomes import Dialled, Unanswered
from telegrad.rpc.layer import Layers, Served
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.request import Request
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.session import Session
from telegrad.rpc.trust.rate import LimitedLog
from telegrad.rpc.workers import Member, WorkerInfo


class QuietIoThreads:
    """Notes what it should run."""

    working = 9  # others have work, so nobody spins

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], None]] = deque()

    def submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def register(self, fd: int, handler: Callable[[], None], *, armed: bool) -> None: ...

    def arm(self, fd: int) -> None: ...

    def disarm(self, fd: int) -> None: ...

    def forget(self, fd: int) -> None: ...

    def sleeping(self, change: int) -> None: ...


class QuietReplyEvents:
    """Answers come when the test says so."""

    def register(self, fd: int, reader: object) -> None: ...

    def arm(self, fd: int, alone: bool = False) -> None: ...

    def disarm(self, fd: int) -> None: ...

    def forget(self, fd: int) -> None: ...

    def asked(self, now: float) -> None: ...

    def others_may_read(self) -> None: ...


class QuietTimer:
    """Its time never comes."""

    def at(self, when: float, task: Callable[[], None]) -> None: ...


class FlushAtOnce:
    """What is held back is written when the test says so."""

    def look_after(self, connection: Any) -> None:
        connection.flush_within = lambda seconds: connection.flush()


class QuietHelpers:
    """Nobody helps to copy."""

    ask = None


class QuietCopier:
    """Copies nothing."""

    ask_for_help: Any = None  # set by links and sessions


class QuietStream:
    """What a link or a session knows of the stream under its connection."""

    last_written = 0.0
    pending = 0
    held = None

    def __init__(self, number: int, readable: Callable[[], bool] = lambda: False) -> None:
        self._number = number
        self._readable = readable

    def fileno(self) -> int:
        return self._number

    def readable(self, seconds: float) -> bool:
        return self._readable()


class QuietRuntime:
    """All that a link or a session asks of its runtime."""

    def __init__(self) -> None:
        self.info = WorkerInfo("quiet", WorkerId(0))
        self.options = RpcBackendOptions()
        self.layers = Layers()
        self.io_threads = QuietIoThreads()
        self.reply_events = QuietReplyEvents()
        self.timer = QuietTimer()
        self.delayed_flush = FlushAtOnce()
        self.helpers = QuietHelpers()
        self.warnings = LimitedLog(logging.getLogger("telegrad.rpc"))
        self.calls_made = self.calls_served = 0
        self.closing = False
        self.patience = 60.0


def quiet_runtime() -> tuple[Runtime, QuietRuntime]:
    """The same object twice: as links and sessions see it, and as tests do."""
    made = QuietRuntime()
    return cast(Runtime, made), made


class Events:
    """What links and sessions tell, which nobody minds; tests override what they do."""

    def dial(self, link: Link, deadline: float) -> Dialled | Unanswered:
        raise NotImplementedError

    def link_lost(self, link: Link) -> None: ...

    def unanswered(self, member: Member, why: str) -> None: ...

    def said_goodbye(self, member: Member, ending: str) -> None: ...

    def session_active(self) -> None: ...
    def session_paused(self, session: Session) -> None: ...

    def session_lost(self, session: Session) -> None: ...

    def caller_said_goodbye(self, member: Member, ending: str) -> None: ...


def serve_with(runtime: QuietRuntime, serve: Callable[[Request], None], *kinds: type, deferrable: bool = False) -> None:
    """Have `serve` handle these messages."""
    for kind in kinds:
        runtime.layers.served[kind] = Served(serve, deferrable=deferrable)
