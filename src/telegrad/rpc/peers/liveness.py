"""Who lives: tells a lost connection from a lost worker, a slow worker from a dead one, a stuck thread from a busy one.

A connection that ends is dialled again at once: a living worker answers, a dead one's address refuses. A worker that
owes an answer and says nothing is asked; one on this host that does not answer is looked up in the process table, so
that a process that is merely busy is left alone and a stopped one is not waited for. Memory that nobody has used for a
while is returned, on both ends of each connection.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from telegrad.errors import TelegradError, WorkerDied
from telegrad.rpc.client.link import Link
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.server.session import Session
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import host_identity
from telegrad.transport.connection import heap
from telegrad.wire.messages import Ack, Exhausted, Ping

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent

log = logging.getLogger("telegrad.rpc")

_WATCH_SECONDS = 0.002
_QUIET_LOOKS = 25  # looks without activity after which the watch rests
_STUCK_LOOKS = 10  # looks without progress after which the I/O threads gets one more thread
_BUSY_FACTOR = 10  # how much longer a worker is waited for whose host answers though it does not itself
REDIAL_SECONDS = 0.05
# How long blocks of memory are kept for the next tensor. New ones cost 100 ms for 100 MB: little in so long a time.
KEEP_IDLE_SECONDS = 10.0


class Liveness(Layer):
    """The watch of one agent over its threads and over its peers."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._watching = False
        self._quiet = 0
        self._stuck = 0
        self._handled = 0
        self._beating = False
        self._was_full = False
        self._asking: set[int] = set()  # incarnations that are being asked by `_ask`

    def messages(self) -> Mapping[type[Any], Served]:
        """A ping that is a request: `Ack` is the reply."""
        return {Ping: Served(lambda request: self._agent.reply(request, Ack()), counts_as_work=False)}

    # --- threads ---

    def watch(self) -> None:
        """Look after the sessions for a while."""
        if not self._watching:
            self._watching = True
            self._quiet = 0
            self._agent.timer.at(time.monotonic() + _WATCH_SECONDS, self._look)

    def _look(self) -> None:
        io_threads = self._agent.io_threads
        progress = io_threads.handled != self._handled
        self._handled = io_threads.handled
        served = False
        for session in self._agent.peers.sessions():
            served = session.relieve() or served
        self._stuck = 0 if progress or not io_threads.exhausted else self._stuck + 1
        if self._stuck >= _STUCK_LOOKS:
            self._stuck = 0
            io_threads.relieve()
        self._quiet = 0 if progress or served or io_threads.exhausted else self._quiet + 1
        if self._quiet < _QUIET_LOOKS:
            self._agent.timer.at(time.monotonic() + _WATCH_SECONDS, self._look)
        else:
            self._watching = False

    # --- peers ---

    def start(self) -> None:
        """Begin to ask silent workers whether they live, and to return memory."""
        if not self._beating:
            self._beating = True
            self._await_tidy()
            if self._agent.options.heartbeat > 0:
                self._beat()

    def _await_tidy(self) -> None:
        io_threads, timer = self._agent.io_threads, self._agent.timer
        timer.at(time.monotonic() + KEEP_IDLE_SECONDS, lambda: io_threads.submit(self._tidy_again))

    def _tidy_again(self) -> None:
        if not self._agent.closing:
            try:
                self.tidy(time.monotonic() - KEEP_IDLE_SECONDS)
            finally:
                self._await_tidy()

    def tidy(self, before: float) -> None:
        """Return the memory of blocks that have been idle since `before` on the monotonic clock."""
        heap.trim(before)
        for link in self._agent.peers.links():
            link.tidy(before)
        for session in self._agent.peers.sessions():
            session.tidy(before)

    def _beat(self) -> None:
        agent = self._agent
        if agent.closing:
            return
        interval = agent.options.heartbeat
        now = time.monotonic()
        for link in agent.peers.links():
            if not link.pending or link.dead is not None:
                link.quiet_since = now
                continue
            silent = now - link.silent_since()
            if silent > self._agent.runtime.patience and not self._is_excused(link, silent):
                why = f"worker {link.member.name!r} has been silent for {silent:.1f} s and does not answer"
                agent.io_threads.attend(functools.partial(agent.lost, link.member, why))
            elif silent > interval:
                link.ping()
        for member in {m.worker_id: m for layer in agent.layers for m in layer.awaited()}.values():
            known = member.worker_id == agent.member.worker_id or agent.is_dead(member)
            if not known and member.incarnation not in self._asking:
                self._asking.add(member.incarnation)
                agent.io_threads.submit(functools.partial(self._ask, member))
        full = agent.io_threads.full
        if full and not self._was_full:
            log.warning(
                "all %d threads of worker %r run what others asked; further requests wait. Calls in a "
                "circle? `rpc.debug_waits(cluster=True)` shows them; `async def` functions need no thread",
                full,
                agent.info.name,
            )
        self._was_full = bool(full)
        for session in agent.peers.sessions():
            if full or session.paused:
                session.ping(Exhausted(full) if full else Ping())
        agent.timer.at(now + interval / 2, self._beat)

    def _ask(self, member: Member) -> None:
        """Have something pending at a worker, so that its end or its silence is noticed."""
        agent = self._agent
        try:
            if not agent.link(member).pending:
                agent.send(member, Ping(), timeout=0.0, what=lambda: "whether it lives", complete=lambda _: None)
        except (TelegradError, OSError) as error:
            log.debug("%s could not be asked whether it lives: %s", member.name, error)
        finally:
            self._asking.discard(member.incarnation)

    def _is_excused(self, link: Link, silent: float) -> bool:
        """Whether a silent worker is only busy, say in a long call into C that keeps Python's lock.

        On this host the process table tells. Of another host only its kernel can be heard: while that confirms pings,
        the network and the host are well, and the worker gets ten times as long."""
        if self._is_here(link.member):
            return self._is_busy(link.member)
        return silent < _BUSY_FACTOR * self._agent.runtime.patience and link.host_answers(self._agent.runtime.patience)

    def _is_here(self, member: Member) -> bool:
        return member.host == host_identity()

    def _is_busy(self, member: Member) -> bool:
        """Whether a silent worker is known to be running all the same: only the process table of its host can tell."""
        if not self._is_here(member):
            return False
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{member.pid}/stat") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
            return state not in "TtZX"
        return False

    def may_answer_yet(self, member: Member, error: OSError) -> bool:
        """Whether dialling again can help: not if nobody listens any more, nor if its process is stopped."""
        if isinstance(error, TimeoutError):
            return not self._is_here(member) or self._is_busy(member)
        return not isinstance(error, ConnectionRefusedError | FileNotFoundError)

    def revive(self, link: Link) -> None:
        """Replace the lost connection of a link, or find that its worker is dead."""
        agent = self._agent
        deadline = time.monotonic() + self._agent.runtime.patience
        while not agent.closing and link.dead is None:
            try:
                link.resume(max(deadline, time.monotonic() + REDIAL_SECONDS))
                return
            except (WorkerDied, TimeoutError) as error:
                if time.monotonic() < deadline or self._is_busy(link.member):
                    with blocking():
                        time.sleep(REDIAL_SECONDS)
                else:
                    agent.lost(link.member, f"worker {link.member.name!r} is gone: its connection closed, and {error}")
            except TelegradError as error:
                agent.lost(link.member, f"worker {link.member.name!r} cannot be reached again: {error}")

    def caller_lost(self, session: Session) -> None:
        """A worker that calls this one lost its connection. If it lives it will dial again; if not, we must know."""
        agent = self._agent
        member = agent.directory.by_id(session.member.worker_id) or session.member
        if member.incarnation != session.member.incarnation or not member.addresses:
            agent.lost(session.member, f"worker {session.member.name!r} closed its connection and was replaced")
            return
        link = agent.link(member)
        if link.connected:
            return  # its end will show there too
        agent.io_threads.attend(lambda: self.revive(link))
