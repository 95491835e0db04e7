"""The bookkeeping of device blocks, without a GPU: who may use a block when, what is given back, and dead peers.

Calls of CUDA are noted by a stand-in for the runtime; `tests/cuda` has the same things on a real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad.errors import ProtocolError
from telegrad.transport.blocks.mapping import Mapping
from telegrad.transport.device import blocks, regions
from telegrad.transport.device.blocks import SLAB, Announcement, DeviceBlock, NoRoom
from telegrad.transport.device.borrowing import DeviceBorrower, DeviceSegment
from telegrad.transport.device.flags import Flags, Number, Page, Patience, Promise, keep_promises
from telegrad.transport.device.lending import DeviceLender
from tests.transport.noted_cuda import MEMORY, Noted, install
from tests.waiting import wait_until


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    yield from install(monkeypatch)


@pytest.fixture
def page() -> Page:
    return Page(1, Mapping(-1, 64 * 1024))


@pytest.fixture
def lender(cuda: Noted, page: Page) -> DeviceLender:
    return DeviceLender(lambda: Flags(page))


def announced(block: DeviceBlock) -> Announcement:
    block.announced = True
    return Announcement(block.number, block.size, "a gpu", block.offset, block.slab.handle, block.flag)


def borrower_of(*lent: DeviceBlock) -> DeviceBorrower:
    regions.exported.clear()  # as in another process
    made = DeviceBorrower(lambda *_: None)
    for block in lent:
        assert made.open(announced(block)) == ""
    return made


def test_small_blocks_share_an_allocation_and_are_used_again(lender: DeviceLender, cuda: Noted) -> None:
    taken = [lender.take(0, 1000) for _ in range(32)]
    assert list(cuda.memory.values()) == [SLAB]
    assert len({block.address for block in taken}) == 32
    taken[5].flag.let_go.set(1)  # as the peer does
    assert lender.lent() == (31, 31 * taken[0].size)
    assert lender.take(0, 1000) is taken[5]
    assert taken[5].uses == 2
    lender.take(0, 1000)
    assert len(cuda.memory) == 2


def test_what_was_not_retired_cannot_be_closed(lender: DeviceLender) -> None:
    block = lender.take(0, 1000)
    for number in (block.number, 3):
        with pytest.raises(ProtocolError, match="which was not retired"):
            lender.closed([number])


def test_beyond_the_share_there_is_no_room(lender: DeviceLender, cuda: Noted) -> None:
    lender.take(0, MEMORY // 2)
    with pytest.raises(NoRoom, match="and may have"):
        lender.take(0, MEMORY)
    assert sum(cuda.memory.values()) == MEMORY // 2


def test_idle_memory_is_freed_once_the_peer_has_closed_it(lender: DeviceLender, cuda: Noted) -> None:
    block = lender.take(0, SLAB)
    peer = borrower_of(block)
    lender.trim(time.monotonic() + 1)
    assert not lender.untold  # it is lent
    peer.borrow(block.name)  # and let go of at once
    lender.trim(time.monotonic() + 1)
    numbers = lender.retired()
    assert numbers == (block.number,) and cuda.memory
    peer.retire(numbers)
    assert not cuda.opened
    lender.closed(peer.closed)
    assert not cuda.memory and not lender.has_blocks


def test_a_loan_waits_copies_and_tells(lender: DeviceLender, cuda: Noted) -> None:
    block = lender.take(0, 1000)
    peer = borrower_of(block)
    loan = peer.borrow(block.name)
    segment: DeviceSegment = loan.part(64, 100)
    del loan
    segment.copy_to(99, torch.device("cuda", 0))
    assert cuda.calls == [
        ("wait", 7, block.flag.written.on_device, 1),
        ("copy", 99, block.address + 64, 100, 7),
    ]
    assert lender.lent() == (1, block.size)
    del segment
    assert cuda.calls[-1] == ("write", 7, block.flag.read.on_device, 1)
    assert lender.lent() == (0, 0)


def test_what_is_wanted_of_a_loan_is_copied_and_told_at_once(lender: DeviceLender, cuda: Noted) -> None:
    block = lender.take(0, 1000)
    block.flag.written.set(1)
    loan = borrower_of(block).borrow(block.name)
    loan.copy_all([loan.part(0, 64), loan.part(64, 100)], [99, 999], torch.device("cuda", 0))
    assert cuda.calls == [
        ("copy", 99, block.address, 64, 7),
        ("copy", 999, block.address + 64, 100, 7),
        ("write", 7, block.flag.read.on_device, 1),
    ]
    del loan
    assert len(cuda.calls) == 3 and lender.lent() == (0, 0)


def test_a_use_is_named_once_and_counted_beyond_what_a_name_holds(lender: DeviceLender) -> None:
    block = lender.take(0, 1000)
    peer = borrower_of(block)
    del_me = peer.borrow(block.name)
    with pytest.raises(ProtocolError, match="without announcing or regaining"):
        peer.borrow(block.name)
    del del_me
    with pytest.raises(ProtocolError, match="twice"):
        peer.borrow(block.name)
    theirs = peer._blocks[block.number]
    assert not isinstance(theirs, str)
    block.uses = theirs.uses = 2**20 - 1
    block.uses += 2  # one message never came
    peer.borrow(block.name)
    assert theirs.uses == 2**20 + 1


def test_a_gpu_that_is_not_seen_is_said_so(lender: DeviceLender) -> None:
    block = lender.take(0, 1000)
    assert "does not see the GPU" in DeviceBorrower(lambda *_: None).open(announced(block)._replace(gpu="another"))


@pytest.mark.parametrize("wrong", [{"number": 5}, {"size": 0}, {"offset": -1}, {"memory": b"short"}])
def test_nonsense_is_refused(lender: DeviceLender, wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        DeviceBorrower(lambda *_: None).open(announced(lender.take(0, 1000))._replace(**wrong))


def test_numbers_count_in_a_circle(page: Page, cuda: Noted) -> None:
    number = Flags(page).take().written
    number.set(2**32 + 5)
    assert number.has_reached(2**32 + 5) and number.has_reached(2**32 - 3)
    assert not number.has_reached(2**32 + 6)


def test_what_was_late_twice_is_not_looked_for_long(page: Page, monkeypatch: pytest.MonkeyPatch, cuda: Noted) -> None:
    looks: list[int] = []

    def look(_: Number, value: int) -> bool:
        looks.append(value)
        return False

    monkeypatch.setattr(Number, "will_soon_reach", look)
    number, patience = Flags(page).take().written, Patience()
    assert [patience.sees(number, value) for value in range(1, 41)] == [False] * 40
    assert looks == [1, 2, 17, 33], "now and then"
    number.set(41)
    assert patience.sees(number, 41) and not patience.sees(number, 42)
    assert looks[-1] == 42, "it was in time again"


def test_what_a_dead_peer_promised_is_written_after_it_was_spoiled(page: Page, cuda: Noted) -> None:
    flag = Flags(page).take()
    seen: list[bool] = []
    keep_promises([Promise(flag.written, 3, lambda: seen.append(flag.written.has_reached(3)))], lambda: True)
    wait_until(lambda: flag.written.has_reached(3))
    assert seen == [False]


def test_a_living_peer_keeps_its_promise_itself(page: Page, cuda: Noted) -> None:
    flag = Flags(page).take()
    spoiled: list[int] = []
    gone: list[int] = []

    def peer_is_gone() -> bool:
        if len(gone) == 2:
            flag.written.set(1)
        gone.append(1)
        return False

    keep_promises([Promise(flag.written, 1, lambda: spoiled.append(1))], peer_is_gone)
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "telegrad-lost-gpu-work"])
    assert len(gone) == 3 and flag.written.has_reached(1) and not spoiled


def test_what_finalizers_release_is_counted(cuda: Noted) -> None:
    budget = blocks.Budget()
    half = int(cuda.total_memory() * budget.share) // 2
    assert budget.reserve(0, half) and budget.reserve(0, half) and not budget.reserve(0, half)
    budget.drop(0, half)
    assert budget.taken(0) == half and budget.reserve(0, half)
