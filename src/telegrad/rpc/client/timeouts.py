"""What a caller is told whose time is up: where the time went.

A request that did not leave knows that itself. For one that was sent, the worker is asked what became of it
(`Layer.whereabouts`), with a short deadline, if the thread that raises the error may wait that long.
"""

import time
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
    exhausted: tuple[float, int]  # when the worker last said that all its threads are taken, and how many

    def last_sign(self) -> float:
        """When something was last heard of the worker."""


def timeout_error(link: TimedLink, slot: Slot, where: str, ask: bool) -> RpcTimeout:
    """The error of a request; `where` says what is known without asking."""
    if not where and ask:
        where = _ask(link, slot)
    said_at, threads = link.exhausted
    if not where and said_at > slot.since:
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
    layers = link.runtime.layers
    if layers.plain:
        return ""  # one that does not trust this worker would refuse to say
    if layers.whereabouts is None or not slot.resend or not layers.is_work(type(slot.resend[0])):
        return ""  # what Telegrad asks for itself, such as this very question, is not asked after
    said = layers.whereabouts(link.member, link.number, slot.request_id, min(ASK_SECONDS, slot.timeout / 2))
    if said:
        return f"{said}. Pass a longer `timeout` if that is expected"
    if link.exhausted[0] > slot.since:
        return ""
    silent = time.monotonic() - link.last_sign()
    return f"does not say where it is, and nothing came from it for {silent:.1f} s: it is stopped, or too busy"
