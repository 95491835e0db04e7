"""What each worker does for whoever watches the job: it answers questions about itself.

    clock      the time here
    record     begin to record events; `stop` ends that
    kernels    record those of the GPU as well, from when this process uses one
    collect    the events since the last time
    snapshot   counters, links, references, contexts, passes, waits
    threads    what each thread runs and waits for
    members    who the workers are

Several may watch at once: recording is on while anybody wants it and lives, and events are kept for each of them, up to
a limit.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from telegrad import trace
from telegrad.errors import ProtocolError, TelegradError
from telegrad.ids import generation_of
from telegrad.observe.events.kernels import Kernel, Kernels, can_record
from telegrad.observe.events.records import AnyEvent, Batch, Call, encode, readable, thread_names
from telegrad.observe.metrics import Metrics
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.request import Request
from telegrad.rpc.workers import Member
from telegrad.wire.messages import Observe, Observed, RpcWithTrace

LIVE = "live"  # what names of those begin with who watch counters only: no events are kept for them
LOG = "log"  # nor for this one, who writes each call to the log
calls = logging.getLogger("telegrad.calls")
_MOST_KEPT = trace.CAPACITY
_DRAIN_SECONDS = 0.5
_RECENT = 50


class Observation(Layer):
    """One agent, watched."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.metrics = Metrics(agent)
        self.since = time.monotonic()
        self.recent: list[tuple[float, str, str]] = []  # when (of the wall clock), what kind, in words
        self._lock = threading.Lock()
        self._watchers: dict[str, list[trace.Event | Kernel]] = {}  # events as they were recorded, for each
        self._lost: dict[str, int] = {}
        self._asked_by: dict[str, int] = {}  # the incarnations of those who watch from elsewhere
        self._threads: dict[int, str] = {}
        self._kernels: tuple[str, Kernels | None] | None = None  # who wants them, and the session once it has begun
        if calls.isEnabledFor(logging.DEBUG):
            self.watch(LOG)

    # --- recording ---

    def watch(self, watcher: str, incarnation: int | None = None) -> None:
        """Somebody wants events, or counters, from now on; until that incarnation, where one is given, is gone."""
        with self._lock:
            if incarnation is not None:
                self._asked_by[watcher] = incarnation
            begins = not self._watchers
            self._watchers.setdefault(watcher, [])
            if trace.recorder is None:
                trace.recorder = trace.Recorder()
        if begins:
            self._drain_later()

    def unwatch(self, watcher: str) -> None:
        """They do no longer."""
        self.kernels_of(watcher)
        with self._lock:
            for kept in (self._watchers, self._lost, self._asked_by):
                kept.pop(watcher, None)
            if not self._watchers:
                trace.recorder = None

    @property
    def watched(self) -> bool:
        """Whether anybody watches."""
        return bool(self._watchers)

    def _drain_later(self) -> None:
        if self._watchers and not self.agent.closing:
            self.agent.timer.at(time.monotonic() + _DRAIN_SECONDS, partial(self.agent.io_threads.submit, self._tick))

    def want_kernels(self, watcher: str) -> None:
        """They want what the GPU does as well; one at a time can have it."""
        with self._lock:
            if self._kernels is None:
                self._kernels = (watcher, None)
        self._begin_kernels()

    def _begin_kernels(self) -> None:
        """A process that has not used its GPU yet is looked at again later."""
        with self._lock:
            if self._kernels is None or self._kernels[1] is not None or not can_record():
                return
            session = Kernels()
            self._kernels = (self._kernels[0], session)
        session.start()

    def kernels_of(self, watcher: str) -> None:
        """End the recording of the GPU for a watcher; what ran there is among its events then."""
        with self._lock:
            if self._kernels is None or self._kernels[0] != watcher:
                return
            (_, session), self._kernels = self._kernels, None
        if session is not None:
            kernels = session.stop()
            with self._lock:
                self._watchers.setdefault(watcher, []).extend(kernels)
                self._lost[watcher] = self._lost.get(watcher, 0) + session.lost

    def _tick(self) -> None:
        self._begin_kernels()
        self.drain()
        self._drain_later()

    def drain(self) -> None:
        """Count what was recorded, and keep it for those who collect."""
        with self._lock:
            recorder = trace.recorder
            if recorder is None:
                return
            events = recorder.drain()
            self._threads.update(thread_names())
            lost, recorder.lost = recorder.lost, 0
            counts = any(watcher.startswith(LIVE) for watcher in self._watchers)
            read = readable(events) if counts or LOG in self._watchers else []
            if counts:
                self.metrics.count(read, lost)
            if LOG in self._watchers:
                self._log(read)
            for watcher, kept in self._watchers.items():
                if watcher.startswith((LIVE, LOG)):
                    continue
                room = _MOST_KEPT - len(kept)
                kept.extend(events[:room])
                self._lost[watcher] = self._lost.get(watcher, 0) + lost + max(0, len(events) - room)

    def _log(self, events: list[AnyEvent]) -> None:
        name = self.agent.info.name
        for event in events:
            if isinstance(event, Call):
                took, end = (event.end - event.since) * 1e3, "returned" if event.ok else "failed"
                calls.debug("%s: %s %s after %.3f ms, %d bytes sent", name, event.what, end, took, event.size)

    def take(self, watcher: str) -> tuple[list[trace.Event | Kernel], dict[int, str], int]:
        """The events since that watcher's last time, as they were recorded; the names of threads; how many are lost."""
        self.drain()
        with self._lock:
            events = self._watchers.get(watcher, [])
            if watcher in self._watchers:
                self._watchers[watcher] = []
            return events, dict(self._threads), self._lost.pop(watcher, 0)

    def collect(self, watcher: str) -> Batch:
        """The same for one who watches from elsewhere."""
        events, threads, lost = self.take(watcher)
        read = readable(events)
        return Batch(self.agent.member.incarnation, len(read), encode(read), threads, lost)

    # --- what happened ---

    def note(self, kind: str, text: str) -> None:
        """Remember a death or an error for those who look later."""
        self.recent = [*self.recent[-_RECENT + 1 :], (time.time(), kind, text)]
        if trace.recorder is not None:
            trace.recorder.mark(text, kind)

    def whereabouts(self, member: Member, link: int, request_id: int, seconds: float) -> str:
        """Where a request is that took too long."""
        return str(_load("whereabouts").ask_whereabouts(self.agent, member, link, request_id, seconds))

    def on_news(self, members: Sequence[Member]) -> Sequence[Member]:
        """Records were read: a worker that was known in an earlier incarnation has come back."""
        for member in members:
            known = self.agent.directory.known(member.worker_id)
            if known is None or member.leaving or member.incarnation == known.incarnation:
                continue
            if generation_of(member.incarnation) > generation_of(known.incarnation):
                self.note("restart", f"{member.name} was started again")
        return members

    def on_death(self, member: Member) -> None:
        """Another worker is gone, or one who watched."""
        for watcher in [name for name, by in list(self._asked_by.items()) if by == member.incarnation]:
            self.unwatch(watcher)
        if member.addresses:  # an observer has none
            self.note("death", f"{member.name} is gone")

    # --- answering ---

    def answer(self, what: str, data: bytes, asked_by: int | None = None) -> bytes:
        """The answer to a question, of that incarnation."""
        answers: dict[str, Callable[[], Any]] = {
            "clock": time.monotonic,
            "record": lambda: self.watch(data.decode(), asked_by),
            "stop": lambda: self.unwatch(data.decode()),
            "kernels": lambda: self.want_kernels(data.decode()),
            "end kernels": lambda: self.kernels_of(data.decode()),
            "collect": lambda: self.collect(data.decode()),
            "snapshot": lambda: _load("snapshot").snapshot(self),
            "threads": lambda: _load("threads").activities(self.agent),
            "whereabouts": lambda: _load("whereabouts").whereabouts(self.agent, data),
            "members": self.agent.peers.everyone,
            "profile a pass": lambda: _load("profiling.remote").profile_pass(self.agent, data),
            "the profile of a pass": lambda: _load("profiling.remote").profiled_pass(self.agent, data),
        }
        if what not in answers:
            raise ProtocolError(f"worker {self.agent.info.name!r} knows nothing of {what!r}")
        return encode(answers[what]())

    def messages(self) -> Mapping[type[Any], Served]:
        """Questions of those who watch."""
        return {Observe: Served(self._serve, counts_as_work=False), RpcWithTrace: Served(self._serve_traced)}

    def _serve_traced(self, request: Request) -> None:
        """A call that came with a trace context: within a span, where OpenTelemetry is installed."""
        message = request.message
        assert type(message) is RpcWithTrace
        request.message = message.call
        try:
            tracing = _load("spans").tracing_of(self.agent)
        except TelegradError:
            request.session.serve(request)
        else:
            tracing.serve(request, message)

    def _serve(self, request: Request) -> None:
        message = request.message
        assert type(message) is Observe
        self.agent.reply(request, Observed(self.answer(message.what, message.data, request.session.member.incarnation)))

    def on_close(self) -> None:
        """The agent ends."""
        for watcher in list(self._watchers):
            self.unwatch(watcher)


def _load(name: str) -> Any:
    """A part that only those who are asked for it need."""
    return importlib.import_module(f"telegrad.observe.{name}")


def observation_of(agent: Agent) -> Observation:
    """What is watched of an agent."""
    return agent.layer(Observation)


def clock(data: bytes) -> float:
    """The answer to `clock`."""
    return float(msgspec.msgpack.decode(data))
