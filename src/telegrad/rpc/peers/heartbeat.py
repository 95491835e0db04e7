"""Asks silent workers whether they live, dials those again whose connection ended, and does what `liveness.py` decides.

The beat comes from the timer. Whatever may wait (dialling, ending what waits for a dead worker) is done by the I/O
threads.
"""

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from telegrad.errors import TelegradError, WorkerDied
from telegrad.rpc.client.connecting import Connecting
from telegrad.rpc.client.link import Link
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.peers.liveness import Action, Evidence, Failure, is_final
from telegrad.rpc.peers.peers import Peers
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.session import Session
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Directory, Member
from telegrad.transport.addresses import host_identity
from telegrad.wire.messages import Ack, Ping

log = logging.getLogger("telegrad.rpc")

REDIAL_SECONDS = 0.05
_MOST_REDIAL_THREADS = 32  # however many workers cannot be reached at a time


def evidence_of(member: Member, link: Link | None = None, seconds: float = 0.0) -> Evidence:
    """What is known of a worker that says nothing, from the process table or from the kernel of its host."""
    if member.host != host_identity():
        return Evidence(False, False, link is not None and link.host_answers(seconds))
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{member.pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        return Evidence(True, state not in "TtZX")
    return Evidence(True, False)


def failure_of(error: OSError) -> Failure:
    """What the error of a dial says."""
    if isinstance(error, TimeoutError):
        return Failure.TIMED_OUT
    nobody = isinstance(error, ConnectionRefusedError | FileNotFoundError)
    return Failure.NOBODY_LISTENS if nobody else Failure.BROKEN


def cannot_answer(member: Member, error: OSError) -> bool:
    """Whether a worker that did not answer is known to be dead."""
    return is_final(failure_of(error), evidence_of(member))


class Heartbeat(Layer):
    """Asks the workers that one agent expects something of whether they live."""

    def __init__(self, runtime: Runtime, me: Member, directory: Directory, peers: Peers) -> None:
        self._runtime = runtime
        self._me = me
        self._directory = directory
        self._peers = peers
        self._beating = False
        self._asking: set[int] = set()  # incarnations that are being asked by `_ask`
        self._lock = threading.Lock()
        self._redialling: dict[Connecting, bool] = {}  # and whether a connection was lost since it began
        self._to_redial: deque[Connecting] = deque()  # those of them that no thread is dialling now
        self._redial_threads = 0

    def messages(self) -> Mapping[type[Any], Served]:
        """A ping that is a request: `Ack` is the reply."""
        return {Ping: Served(lambda request: request.reply(Ack()), counts_as_work=False)}

    def start(self) -> None:
        """Begin to ask silent workers whether they live."""
        if not self._beating and self._runtime.options.heartbeat > 0:
            self._beating = True
            self._beat()

    def _beat(self) -> None:
        if self._runtime.closing:
            return
        now = time.monotonic()
        for link in self._peers.links():
            if link.dead is None:
                self._look_at(link, now)
        for member in {m.worker_id: m for layer in self._runtime.layers for m in layer.awaited()}.values():
            known = member.worker_id == self._me.worker_id or self._peers.is_dead(member)
            if not known and member.incarnation not in self._asking:
                self._asking.add(member.incarnation)
                self._runtime.io_threads.submit(functools.partial(self._ask, member))
        self._runtime.timer.at(now + self._runtime.options.heartbeat / 2, self._beat)

    def _look_at(self, link: Link, now: float) -> None:
        member, liveness = link.member, self._peers.liveness_of(link.member)
        evidence = functools.partial(evidence_of, member, link, self._runtime.patience)
        action = liveness.beat(now, bool(link.pending), link.last_sign(), evidence)
        if action is Action.PING:
            link.ping()
        elif action is Action.GIVE_UP:
            why = f"worker {member.name!r} has been silent for {liveness.silent:.1f} s and does not answer"
            self._runtime.io_threads.attend(functools.partial(self._peers.lost, member, why))

    def _ask(self, member: Member) -> None:
        """Have something pending at a worker, so that its end or its silence is noticed."""
        try:
            link = self._peers.link(member)
            if not link.pending:
                link.send(Ping(), timeout=0.0, what="whether it lives", complete=lambda _: None)
        except (TelegradError, OSError) as error:
            log.debug("%s could not be asked whether it lives: %s", member.name, error)
        finally:
            self._asking.discard(member.incarnation)

    # --- lost connections ---

    def link_lost(self, link: Connecting) -> None:
        """A connection this worker had dialled ended: replace it, or find that its worker is dead."""
        if self._runtime.closing:
            link.close()
        elif self._peers.liveness_of(link.member).connection_lost(time.monotonic()) is Action.REDIAL:
            with self._lock:  # once for each worker, however many of its connections end
                redials = link in self._redialling
                self._redialling[link] = redials
                if not redials:
                    self._to_redial.append(link)
            if not redials:
                self._redial_in_thread()

    def session_lost(self, session: Session) -> None:
        """A worker that calls this one lost its connection. If it lives it will dial again; if not, we must know."""
        if self._runtime.closing:
            return
        caller = session.member
        member = self._directory.by_id(caller.worker_id) or caller
        if not member.addresses:  # an observer: it is no member, and nobody misses it
            self._peers.lost(caller, f"{caller.name!r} closed its connection", departed=True)
            return
        if member.incarnation != caller.incarnation:
            self._peers.lost(caller, f"worker {caller.name!r} closed its connection and was replaced")
            return
        link = self._peers.link(member)
        if not link.connected:  # else its end will show there too
            self.link_lost(link)

    def _redial_in_thread(self) -> None:
        """Have a thread dial those who wait for it, unless as many do so as may: then these come to them in turn."""
        with self._lock:
            starts = bool(self._to_redial) and self._redial_threads < _MOST_REDIAL_THREADS
            self._redial_threads += starts
        if starts:
            self._runtime.io_threads.attend(self._redial)

    def _redial(self) -> None:
        """Dial one after the other, each once, until none is left."""
        while True:
            with self._lock:
                if not self._to_redial:
                    self._redial_threads -= 1
                    return
                link = self._to_redial.popleft()
                # One that does not answer must not keep the others waiting for all the time it has.
                seconds = self._runtime.patience / (2 if self._to_redial else 1)
            try:
                again = self._dial_once(link, seconds)
            except BaseException:
                with self._lock:
                    self._redialling.pop(link, None)
                    self._redial_threads -= 1
                self._redial_in_thread()
                raise
            with self._lock:
                lost_again = self._redialling[link] and not (link.connected or link.dead)
                self._redialling[link] = False
                if (again or lost_again) and not self._runtime.closing:
                    self._to_redial.append(link)
                else:
                    del self._redialling[link]

    def _dial_once(self, link: Connecting, seconds: float) -> bool:
        """Dial a worker; True if it is to be dialled again, since it did not answer and is not given up."""
        member, liveness = link.member, self._peers.liveness_of(link.member)
        if self._runtime.closing or link.dead is not None:
            return False
        try:
            link.resume(time.monotonic() + seconds)
            liveness.connected(time.monotonic())
            return False
        except (WorkerDied, TimeoutError) as error:
            why = f"its connection closed, and {error}"
            # Where it was final, the dial has said so, and the link is dead.
            action = liveness.unanswered(time.monotonic(), Failure.BROKEN, evidence_of(member))
        except TelegradError as error:
            why, action = f"it cannot be reached again: {error}", Action.GIVE_UP
        if action is not Action.REDIAL:
            self._peers.unanswered(member, f"worker {member.name!r} is gone: {why}")
            return False
        with blocking():
            time.sleep(REDIAL_SECONDS)
        return True
