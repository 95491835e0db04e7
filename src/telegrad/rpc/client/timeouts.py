"""What a caller is told whose time is up: where the time went.

A request that did not leave knows that itself. For one that was sent, the worker is asked what became of it
(`Layer.whereabouts`), with a short deadline: by the thread that waits for it, or if none does, by one of its own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from telegrad.errors import RpcTimeout
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.workers import Member

NOT_CONNECTED = "did not answer in that time: there is no connection to it yet"
NOT_TAKEN = "has not taken in all of what was sent: it reads too slowly, is stopped, or the network is slow"
ASK_SECONDS = 0.25  # at most, for what a worker says of a request


class TimedLink(Protocol):
    """What is asked of the link that a request went over."""

    member: Member
    number: int
    runtime: Runtime
    exhausted: tuple[float, int, int]  # when the worker last said that what is asked waits, and why (`Exhausted`)

    def last_sign(self) -> float:
        """When something was last heard of the worker."""

    def timeout_error(self, slot: Slot, *, ask: bool = False) -> RpcTimeout:
        """What a caller gets whose deadline passed."""

    def stopped_waiting(self, slot: Slot) -> None:
        """Nobody waits any more: the worker may be told."""


def timeout_error(link: TimedLink, slot: Slot, where: str, ask: bool) -> RpcTimeout:
    """The error of a request; `where` says what is known without asking."""
    if not where and ask:
        where = _ask(link, slot)
    said_at, threads, running = link.exhausted
    if not where and running:
        where = (
            f"has not read it: {running} requests of this worker run there, and it takes no more until some are done. "
            "Wait for some before asking for more, as `rpc.map` does"
        )
    if not where and threads and said_at > slot.since:
        where = (
            f"says that all its {threads} threads are taken, so that this may not have begun. Do calls wait for "
            "each other? `telegrad.observe.explain()` shows them; `async def` functions need no thread"
        )
    state = where or "may still be running it. Pass a longer `timeout` if that is expected"
    return RpcTimeout(
        f"RPC ran for more than set timeout ({round(slot.timeout * 1000)} ms) and will now be marked with an "
        f"error: {slot.what()} did not return; worker {link.member.name!r} {state}"
    )


def _ask(link: TimedLink, slot: Slot) -> str:
    whereabouts = link.runtime.layers.whereabouts
    if whereabouts is None or not _can_ask(link, slot):
        return ""
    said = whereabouts(link.member, link.number, slot.request_id, min(ASK_SECONDS, slot.timeout / 2))
    if said:
        return f"{said}. Pass a longer `timeout` if that is expected"
    said_at, threads, running = link.exhausted
    if running or (threads and said_at > slot.since):
        return ""
    silent = time.monotonic() - link.last_sign()
    if silent < ASK_SECONDS:
        return "answers, but did not say in time where it is: it is busy with what was asked before"
    return f"does not say where it is, and nothing came from it for {silent:.1f} s: it is stopped, or too busy"


def _can_ask(link: TimedLink, slot: Slot) -> bool:
    """What Telegrad asks for itself, such as where a request is, is not asked after; and one that does not trust this
    worker would refuse to say."""
    layers = link.runtime.layers
    return (
        not layers.plain
        and layers.whereabouts is not None
        and bool(slot.resend)
        and layers.is_work(type(slot.resend[0]))
    )


class LateCalls:
    """Futures of one link whose time is up and which no thread waits for.

    The timer may not wait for what the worker says of them, so a thread does, for a quarter of a second: after that
    long, they end without. It is there only while there are any."""

    def __init__(self, link: TimedLink, settle: Callable[[list[Slot]], None]) -> None:
        self._link = link
        self._settle = settle  # takes slots that have their error
        self._lock = threading.Lock()
        self._late: deque[Slot] = deque()
        self._running = False

    def add(self, slots: list[Slot]) -> None:
        """The timer: these are late, and have left the table."""
        work = []
        for slot in slots:
            if _can_ask(self._link, slot):
                work.append(slot)
            else:
                self._end(slot, ask=False)
        with self._lock:
            self._late.extend(work)
            if self._running or not work:
                return
            self._running = True
        threading.Thread(target=self._end_them, name="ends late calls", daemon=True).start()

    def _end_them(self) -> None:
        while True:
            until = time.monotonic() + ASK_SECONDS
            with self._lock:
                batch = list(self._late)
                self._late.clear()
                if not batch:
                    self._running = False
                    return
            for slot in batch:
                self._end(slot, ask=time.monotonic() < until)

    def _end(self, slot: Slot, ask: bool) -> None:
        try:
            slot.error = self._link.timeout_error(slot, ask=ask)
            self._link.stopped_waiting(slot)  # only now: of what it has given up, a worker cannot say where it is
        except Exception as error:  # whatever it is, its caller must not wait
            slot.error = error
        self._settle([slot])
