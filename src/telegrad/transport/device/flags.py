"""Numbers in host memory that two processes and their GPUs see: which use of a block has been written, and read.

A stream writes the number of a use once its copies are done, and a stream of the other process waits for it. CUDA has
events for that, but one of a process that was killed before it reached it never comes, and a stream that waits for it
hangs for good. A number in memory can be written by anybody: after the end of a peer whatever it had promised is
written for it (`keep_promises`), and what a tensor of it would have held is spoiled first (all bits set: NaN).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from telegrad.cuda import host
from telegrad.cuda.runtime import CudaError
from telegrad.errors import ProtocolError
from telegrad.transport.blocks.mapping import Mapping

log = logging.getLogger("telegrad.transport")

_FLAG_BYTES = 16  # four numbers
_SOON_SECONDS = 50e-6
_ENOUGH = 2  # numbers that were looked for in vain, after which that is done now and then only
_TRY_EVERY = 16
_LOOK_SECONDS = 0.02
_GRACE_SECONDS = 0.5  # for what a process that has ended had begun on the GPU


class Page(NamedTuple):
    """A block of host memory that both processes have mapped."""

    number: int
    mapping: Mapping


class Number:
    """One number, as this process and its GPU see it."""

    __slots__ = ("_here", "_page", "on_device")

    def __init__(self, page: Mapping, here: int, on_device: int) -> None:
        self._page = page  # keeps the memory mapped
        self._here = ctypes.c_uint32.from_address(here)
        self.on_device = on_device

    def has_reached(self, value: int) -> bool:
        """Whether it is that large, counted in a circle of 32 bits, as the GPU counts it."""
        return (self._here.value - value) & 0xFFFFFFFF < 2**31

    def will_soon_reach(self, value: int) -> bool:
        """Whether it is that large, or becomes so within the time that a small copy takes. A stream need not wait for
        it then, which costs the GPU more than it costs this thread to look a few times."""
        if self.has_reached(value):
            return True
        until = time.perf_counter() + _SOON_SECONDS
        while time.perf_counter() < until:
            if self.has_reached(value):
                return True
        return False

    def set(self, value: int) -> None:
        """Write it, as a stream would have."""
        self._here.value = value & 0xFFFFFFFF


class Patience:
    """Looks for numbers a while, unless that was in vain before: what a peer computes for long is not there soon."""

    __slots__ = ("_missed",)

    def __init__(self) -> None:
        self._missed = 0  # numbers in a row

    def sees(self, number: Number, value: int) -> bool:
        """Whether a number is that large, now or soon; if not, a stream has to wait for it."""
        if number.has_reached(value):
            self._missed = 0
            return True
        missed = self._missed
        if (missed < _ENOUGH or missed % _TRY_EVERY == 0) and number.will_soon_reach(value):
            self._missed = 0
            return True
        self._missed = missed + 1
        return False


class Flag(NamedTuple):
    """The numbers of one block, or of one place granted, and where they are."""

    page: int
    place: int
    written: Number
    read: Number
    let_go: Number  # set by the other process: its copy is enqueued, or what was granted to it goes back unused
    given_up: Number  # set by the sender: nobody may read it any more who has not begun

    @property
    def free(self) -> Number:
        """The same number of a place that is granted: written by its owner, when nothing is at work in it any more."""
        return self.given_up


class Flags:
    """The flags of all blocks of one lender."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._count = page.mapping.size // _FLAG_BYTES
        self._next = 0
        self._pinned = host.pinned(page.mapping)
        self._made: dict[int, Flag] = {}

    @property
    def page(self) -> int:
        """The number of the block of host memory they lie in."""
        return self._page.number

    def has_room(self, count: int) -> bool:
        """Whether so many more can be taken."""
        return self._next + count <= self._count

    def take(self) -> Flag:
        """The next one."""
        self._next += 1
        return self.at(self._next - 1)

    def at(self, place: int) -> Flag:
        """The one at a place, which a peer may have named."""
        made = self._made.get(place)
        if made is None:
            made = self._made[place] = self._make(place)
        return made

    def _make(self, place: int) -> Flag:
        if not 0 <= place < self._count:
            raise ProtocolError(f"the peer named flag {place} of {self._count}")
        offset = place * _FLAG_BYTES
        mapping = self._page.mapping
        numbers = [
            Number(mapping, mapping.address + offset + more, self._pinned + offset + more) for more in (0, 4, 8, 12)
        ]
        return Flag(self._page.number, place, *numbers)


class Promise(NamedTuple):
    """A number that a peer has said it will write, and what to do first if it never does."""

    number: Number
    value: int
    spoil: Callable[[], None] | None = None


def keep_promises(promises: list[Promise], peer_is_gone: Callable[[], bool]) -> None:
    """A connection has ended: see that what its peer promised is written, by the peer, or here once that is gone."""
    left = [promise for promise in promises if not promise.number.has_reached(promise.value)]
    if left:
        threading.Thread(
            target=_keep_promises, args=(left, peer_is_gone), name="telegrad-lost-gpu-work", daemon=True
        ).start()


def _keep_promises(promises: list[Promise], peer_is_gone: Callable[[], bool]) -> None:
    gone_since: float | None = None
    while promises := [promise for promise in promises if not promise.number.has_reached(promise.value)]:
        if gone_since is None and peer_is_gone():
            gone_since = time.monotonic()
        if gone_since is not None and time.monotonic() - gone_since > _GRACE_SECONDS:
            break
        time.sleep(_LOOK_SECONDS)
    spoilt = 0
    for number, value, spoil in promises:
        if spoil is not None:
            spoilt += 1
            try:
                spoil()
            except CudaError as error:
                log.debug("device memory could not be spoiled: %s", error)
        number.set(value)
    if spoilt:
        log.warning(
            "a worker ended before its GPU had finished %d messages it had sent: their tensors are NaN, or -1 where "
            "they hold integers",
            spoilt,
        )
