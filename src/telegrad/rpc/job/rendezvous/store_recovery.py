"""Keeps a rendezvous store open that lives in the process of one worker, after that worker has gone.

Every worker holds a connection to the store. When it ends, those on the machine of its address try to take the port;
one opens a new store there, the others join it, and each says again who it is and what the lost log had said. So
whoever comes later, the first one under its old name included, finds the others where it looks for them.
"""

import logging
import socket
import time

import msgspec

from telegrad.errors import RendezvousError
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.rendezvous import store as store_host
from telegrad.rpc.job.rendezvous.member_log import MemberLog
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member

log = logging.getLogger("telegrad.rpc")

# Before the first try. All workers of a job that ends together see the end of the store, and leave in this time.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 0.25
_TRY_SECONDS = 5.0
# For a listener that still stands: it may be that of a process which is just being ended, one descriptor after another.
_DOUBT_SECONDS = 0.1


class StoreRecovery:
    """One worker's share in keeping its rendezvous store open."""

    def __init__(self, agent: Agent, member_log: MemberLog) -> None:
        self._agent = agent
        self._member_log = member_log
        self._monitor: socket.socket | None = None
        self._pause = _FIRST_PAUSE
        self._closed = False

    def start(self) -> None:
        """Begin to monitor the store, if it is one that ends with a worker."""
        if self._member_log.where is not None:
            self._member_log.stands = self._stands
            self._look_at(self._member_log.where)

    def close(self) -> None:
        """This worker leaves: others see to the store."""
        self._closed = True
        self._close_monitor()

    def _look_at(self, where: store_host.Endpoint) -> None:
        store = self._member_log.store
        try:
            if store is None:
                raise ConnectionResetError("the store has ended already")
            sock = store_host.connect_monitor(store, where)
        except (OSError, RuntimeError):
            self._lost()
            return
        sock.setblocking(False)
        self._monitor = sock  # its peer sends nothing before its end, so the first event is that
        self._agent.io_threads.register(sock.fileno(), self._on_event, armed=True)
        if self._closed:  # by another thread, which may not have seen this connection
            self._close_monitor()

    def _stands(self) -> bool:
        """Whether the store is not known to have ended: a thread that uses it may notice before the I/O threads."""
        sock = self._monitor
        try:
            if sock is not None:
                sock.recv(1, socket.MSG_PEEK)  # whether nothing or a last record: it ends
        except BlockingIOError:
            return True
        except OSError:
            pass
        return sock is None

    def _on_event(self) -> None:
        if not self._stands():
            sock = self._monitor
            if sock is not None:
                self._agent.peers.take_news(self._member_log.read_last(sock))
            self._close_monitor()
            self._lost()

    def _close_monitor(self) -> None:
        sock, self._monitor = self._monitor, None
        if sock is not None:
            self._agent.io_threads.forget(sock.fileno())
            sock.close()

    def _lost(self) -> None:
        if not self._closed:
            self._member_log.lose()
            self._pause = _FIRST_PAUSE
            self._try_later()

    def _try_later(self) -> None:
        agent = self._agent
        agent.timer.at(time.monotonic() + self._pause, lambda: agent.io_threads.submit(self._try))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _try(self) -> None:
        where = self._member_log.where
        if self._closed or self._agent.closing or where is None:
            return
        try:
            with blocking():
                opens = not store_host.endures(where, _DOUBT_SECONDS) and store_host.is_here(where[0])
                self._member_log.move(store_host.attempt(where, opens=opens, seconds=_TRY_SECONDS), self._say_again)
        except RendezvousError as error:  # another job has begun there
            log.error("worker %r cannot be found by newcomers any more: %s", self._agent.info.name, error)
        except (OSError, RuntimeError) as error:
            log.debug("the rendezvous store %s:%d is still closed: %s", *where, error)
            self._member_log.lose()
            self._try_later()
        else:
            log.info("worker %r is at the rendezvous store %s:%d, which was opened anew", self._agent.info.name, *where)
            self._look_at(where)

    def _say_again(self) -> None:
        """What the lost log had said, as far as this worker knows it."""
        agent = self._agent
        self._member_log.restore(agent.directory.latest())
        if self._member_log.register is not None:
            self._member_log.register.restore(agent.member.generation, self._member_log.has_met)
        if not self._closed:
            self._member_log.publish(agent.member)
        if agent.world_size is not None:
            # A job of fixed size waits for all its ranks, whether they live or not. In an open one each speaks for
            # itself, and who is silent is gone.
            for member in agent.directory.members():
                if member.incarnation != agent.member.incarnation:
                    self._member_log.publish(as_relayed(member))


def as_relayed(member: Member) -> Member:
    """A record as somebody else repeats it."""
    return msgspec.structs.replace(member, relayed=True)
