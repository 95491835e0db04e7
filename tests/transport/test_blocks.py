"""Blocks of memory: lent, released, used again, retired; and given out again when nothing aliases them."""

import contextlib
import ctypes
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from telegrad.errors import ProtocolError
from telegrad.transport.blocks.heap import Heap
from telegrad.transport.blocks.lending import Borrower, Lender
from telegrad.transport.blocks.mapping import MIN_BLOCK, Block, block_size

FOREVER = float("inf")


def test_size_classes_waste_little() -> None:
    assert block_size(0) == block_size(1) == block_size(MIN_BLOCK) == MIN_BLOCK
    for nbytes in [MIN_BLOCK + 1, 100_000, 2**20, 2**20 + 1, 10**9]:
        assert nbytes <= block_size(nbytes) <= 1.25 * nbytes
        assert block_size(block_size(nbytes)) == block_size(nbytes)


def test_a_released_block_is_lent_again() -> None:
    lender = Lender()
    first = lender.take(100_000)
    assert lender.lent_bytes == first.size
    second = lender.take(100_000)
    assert second.number != first.number
    lender.give_back([first.number])
    assert lender.take(100_000) is first
    lender.close()
    assert lender.lent_bytes == 0


@pytest.mark.parametrize("numbers", [[99], [0], [-1]])
def test_what_was_not_lent_cannot_be_released(numbers: list[int]) -> None:
    lender = Lender()
    with pytest.raises(ProtocolError, match="not been lent"):
        lender.give_back(numbers)


def test_a_second_release_is_refused() -> None:
    lender = Lender()
    block = lender.take(1)
    lender.give_back([block.number])
    with pytest.raises(ProtocolError):
        lender.give_back([block.number])
    lender.close()


def test_blocks_beyond_the_limit_are_retired_once() -> None:
    lender = Lender(idle_limit=2 * MIN_BLOCK)
    blocks = [lender.take(1) for _ in range(4)]
    assert not lender.untold
    lender.give_back([b.number for b in blocks])
    assert lender.untold
    assert lender.retired() == (blocks[2].number, blocks[3].number)
    assert lender.retired() == ()
    lender.close()


def _map(borrower: Borrower, number: int, size: int = MIN_BLOCK) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    borrower.map(number, fd, size)


def test_a_borrowed_block_is_released_with_its_last_alias() -> None:
    borrower = Borrower()
    _map(borrower, 3)
    memory = borrower.borrow(3)
    view = memoryview(memory).cast("B")[10:20]
    view[0] = 7
    del memory
    assert borrower.in_use == 1
    assert not borrower.untold
    del view
    assert borrower.in_use == 0
    assert borrower.released() == (3,)
    assert borrower.released() == ()
    again = borrower.borrow(3)
    assert again[10] == b"\x07"  # the same memory


def test_a_block_in_use_cannot_come_again() -> None:
    borrower = Borrower()
    _map(borrower, 3)
    memory = borrower.borrow(3)
    with pytest.raises(ProtocolError, match="twice"):
        borrower.borrow(3)
    del memory


def test_a_retired_block_lives_as_long_as_it_is_used() -> None:
    borrower = Borrower()
    _map(borrower, 3)
    memory = borrower.borrow(3)
    borrower.retire([3, 99])
    assert borrower.mapped == 0
    memory[0] = b"x"
    assert memory[0] == b"x"


def test_announced_sizes_are_checked_and_descriptors_closed() -> None:
    borrower = Borrower()
    for size in (0, -1, 2 * MIN_BLOCK, 2**63):
        fd = os.memfd_create("telegrad-lie")
        os.ftruncate(fd, MIN_BLOCK)
        with pytest.raises(ProtocolError):
            borrower.map(1, fd, size)
    assert not [target for target in open_files() if "telegrad-lie" in target]


def open_files() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_receive_buffers_are_used_again_once_free() -> None:
    heap = Heap()
    first = heap.allocate(100_000)
    address = ctypes.addressof(first)
    second = heap.allocate(100_000)
    assert ctypes.addressof(second) != address
    view = memoryview(first).cast("B")[5:]
    del first
    assert ctypes.addressof(heap.allocate(100_000)) != address
    del view
    assert ctypes.addressof(heap.allocate(100_000)) == address


def test_a_heap_keeps_no_more_than_its_limit() -> None:
    heap = Heap(idle_limit=3 * MIN_BLOCK)
    held = [heap.allocate(1) for _ in range(10)]
    held.clear()
    assert heap._idle_bytes == 3 * MIN_BLOCK


def test_what_is_idle_for_long_goes_and_what_is_in_use_stays() -> None:
    lender = Lender()
    lent, idle, young = (lender.take(size) for size in (1, 1, 100_000))
    lender.give_back([idle.number])
    between = time.monotonic()
    lender.give_back([young.number])
    lender.trim(idle.idle_since)  # not before: none is older
    assert not lender.untold
    lender.trim(between)
    assert lender.retired() == (idle.number,)
    lender.trim(between)
    assert not lender.untold
    assert lender.take(100_000) is young
    assert lender.take(1) not in (idle, lent)
    lender.close()


def test_the_oldest_of_a_size_go_first() -> None:
    lender = Lender()
    first, second = lender.take(1), lender.take(1)
    lender.give_back([first.number])
    lender.give_back([second.number])
    assert lender.take(1) is second  # the last to come is used again, so that the first can grow old
    lender.give_back([second.number])
    lender.trim(second.idle_since)
    assert lender.retired() == (first.number,)
    lender.close()


def test_a_lender_without_blocks_has_none() -> None:
    lender = Lender()
    assert not lender.has_blocks
    block = lender.take(1)
    assert lender.has_blocks
    lender.give_back([block.number])
    assert lender.has_blocks
    lender.trim(FOREVER)
    assert not lender.has_blocks
    assert lender._idle_bytes == lender.lent_bytes == 0


def test_memory_is_unmapped_when_it_is_trimmed() -> None:
    before = shared_mappings()
    lender, borrower, heap = Lender(), Borrower(), Heap()
    block = lender.take(MIN_BLOCK)
    borrower.map(block.number, os.dup(block.fd), block.size)
    heap.allocate(3 * MIN_BLOCK)
    assert len(shared_mappings() - before) == 2
    lender.give_back([block.number])
    del block
    lender.trim(FOREVER)
    borrower.retire(lender.retired())
    heap.trim(FOREVER)
    assert not shared_mappings() - before
    assert heap._idle_bytes == 0


def shared_mappings() -> set[str]:
    """Blocks that this process has mapped. Earlier tests may have left some to the garbage collector."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:telegrad" in line}


def test_a_heap_keeps_what_was_used_lately() -> None:
    heap = Heap()
    first, second = heap.allocate(1), heap.allocate(1)
    old, young = ctypes.addressof(first), ctypes.addressof(second)
    del first
    between = time.monotonic()
    del second
    heap.trim(between)
    assert heap._idle_bytes == MIN_BLOCK
    assert ctypes.addressof(again := heap.allocate(1)) == young
    assert ctypes.addressof(heap.allocate(1)) != young
    assert old != young and again is not None


# --- blocks that are sent back ---


def lend(lender: Lender, borrower: Borrower, nbytes: int = 1) -> tuple[Block, Any]:
    """A block that was lent with a message, and what the receiver's tensors alias."""
    block = lender.take(nbytes)
    if block.number not in borrower:
        borrower.map(block.number, os.dup(block.fd), block.size)
    return block, borrower.borrow(block.number)


@pytest.mark.parametrize("peer_first", [True, False], ids=["the peer lets go first", "the peer lets go last"])
def test_a_block_that_was_sent_back_is_free_when_both_have_let_go(peer_first: bool) -> None:
    """Lent again any earlier, it would be written to under the eyes of the one who still looks at it."""
    lender = Lender()
    block = lender.take(1)
    ours = lender.regain(block.number)
    if peer_first:
        lender.give_back([block.number])
    else:
        del ours
    assert lender.take(1) is not block
    assert lender.lent_bytes == 2 * MIN_BLOCK
    if peer_first:
        del ours
    else:
        lender.give_back([block.number])
    assert lender.lent_bytes == MIN_BLOCK
    assert lender.take(1) is block
    lender.close()


@pytest.mark.parametrize("peer_at", [0, 1, 2], ids=["the peer first", "the peer between", "the peer last"])
def test_a_block_sent_back_twice_is_free_when_both_aliases_are_gone(peer_at: int) -> None:
    """Two tensors of one block may come back with two replies."""
    lender = Lender()
    block = lender.take(1)
    ours = [lender.regain(block.number), lender.regain(block.number)]
    steps: list[Callable[[], object]] = [ours.pop, ours.pop]
    steps.insert(peer_at, lambda: lender.give_back([block.number]))
    for step in steps:
        assert lender.lent_bytes == MIN_BLOCK
        step()
    assert lender.lent_bytes == 0
    assert lender.take(1) is block
    lender.close()


def test_what_was_sent_back_is_the_memory_that_was_lent() -> None:
    lender, borrower = Lender(), Borrower()
    block, theirs = lend(lender, borrower)
    theirs[7] = b"x"
    ours = lender.regain(block.number)
    assert ours[7] == b"x"
    assert len(ours) == block.size
    lender.close()


def test_a_block_that_was_not_lent_cannot_be_sent_back() -> None:
    lender = Lender()
    released, kept = lender.take(1), lender.take(1)
    lender.give_back([released.number])
    ours = lender.regain(kept.number)
    lender.give_back([kept.number])  # the peer has let go of it, though not all here have
    for number in (released.number, kept.number, 99, 0, -1):
        with pytest.raises(ProtocolError, match="not been lent"):
            lender.regain(number)
    with pytest.raises(ProtocolError, match="not been lent"):
        lender.give_back([kept.number])
    del ours
    assert lender.lent_bytes == 0
    lender.close()


def test_what_was_sent_back_outlives_its_lender() -> None:
    """A result is the caller's, whatever becomes of the connection it came over."""
    before = shared_mappings()
    lender = Lender()
    block = lender.take(1)
    ours = lender.regain(block.number)
    lender.close()
    del block
    ours[0] = b"x"
    assert ours[0] == b"x"
    assert len(shared_mappings() - before) == 1
    del ours
    assert not shared_mappings() - before
    assert lender.lent_bytes == 0


def test_what_comes_after_the_end_is_not_the_peers_fault() -> None:
    """One thread may close a connection while another still reads from it. A ProtocolError there would fail all that
    waits for the peer; the end of the connection has it asked again."""
    lender = Lender()
    number = lender.take(1).number
    lender.close()
    with pytest.raises(ConnectionError):
        lender.regain(number)
    with pytest.raises(ConnectionError):
        lender.give_back([number])


def test_what_was_sent_back_is_not_trimmed() -> None:
    lender = Lender()
    block = lender.take(1)
    ours = lender.regain(block.number)
    lender.give_back([block.number])
    lender.trim(FOREVER)
    assert not lender.untold
    del ours
    lender.trim(FOREVER)
    assert lender.retired() == (block.number,)
    lender.close()


def test_memory_is_found_in_the_block_it_lies_in() -> None:
    """What is taken for the peer's own memory and is not would arrive as other bytes."""
    lender, borrower = Lender(), Borrower()
    lent = [lend(lender, borrower, size) for size in (1, 200_000, 1)]
    for block, alias in lent:
        begin, last = ctypes.addressof(alias), block.size - 1
        assert borrower.find(begin, block.size) == (block.number, 0)
        assert borrower.find(begin + 10, 20) == (block.number, 10)
        assert borrower.find(begin + last, 1) == (block.number, last)
        assert borrower.find(begin + last, 2) is None  # beyond the end
        assert borrower.find(begin, block.size + 1) is None
    starts = sorted(ctypes.addressof(alias) for _, alias in lent)
    ends = {ctypes.addressof(alias) + block.size for block, alias in lent}
    assert borrower.find(starts[0] - 1, 1) is None  # below all
    for end in ends - set(starts):  # between two, or above all
        assert borrower.find(end, 1) is None
    lender.close()


def test_only_blocks_in_use_are_found() -> None:
    """The owner may have lent another one's memory to somebody else by the time it comes back."""
    lender, borrower = Lender(), Borrower()
    assert borrower.find(4096, 1) is None
    block, alias = lend(lender, borrower)
    address = ctypes.addressof(alias)
    del alias
    assert borrower.find(address, 1) is None
    alias = borrower.borrow(block.number)
    assert borrower.find(address, 1) == (block.number, 0)
    borrower.retire([block.number])
    assert borrower.find(address, 1) is None
    del alias
    lender.close()


class Traffic(RuleBasedStateMachine):
    """A lender and a borrower in any order of events. Who aliases a block is kept here, by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.lender, self.borrower = Lender(idle_limit=4 * MIN_BLOCK), Borrower()
        self.ours: list[tuple[int, Any]] = []
        self.theirs: list[tuple[int, Any]] = []
        self.under_way: set[int] = set()  # released by the borrower, and not yet heard of by the lender

    def teardown(self) -> None:
        self.ours.clear()
        self.theirs.clear()
        self.hear()
        assert self.lender.lent_bytes == 0
        assert not self.lender._regained and not self.lender._released and not self.lender._aliases
        self.lender.trim(FOREVER)
        self.borrower.retire(self.lender.retired())
        assert not self.lender.has_blocks
        assert self.borrower.mapped == 0
        self.lender.close()

    @rule(nbytes=st.sampled_from([1, 100_000]))
    def send(self, nbytes: int) -> None:
        self.borrower.retire(self.lender.retired())
        block, alias = lend(self.lender, self.borrower, nbytes)
        used = {number for number, _ in self.ours + self.theirs} | self.under_way
        assert block.number not in used
        self.theirs.append((block.number, alias))

    @precondition(lambda self: self.theirs)
    @rule(data=st.data())
    def send_back(self, data: st.DataObject) -> None:
        number, alias = self.theirs[data.draw(st.integers(0, len(self.theirs) - 1))]
        found = self.borrower.find(ctypes.addressof(alias) + 3, 5)
        assert found == (number, 3)
        self.ours.append((number, self.lender.regain(number)))

    @precondition(lambda self: self.theirs)
    @rule(data=st.data())
    def they_let_go(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.theirs) - 1))
        self.under_way.add(self.theirs.pop(position)[0])

    @precondition(lambda self: self.ours)
    @rule(data=st.data())
    def we_let_go(self, data: st.DataObject) -> None:
        self.ours.pop(data.draw(st.integers(0, len(self.ours) - 1)))

    @rule()
    def hear(self) -> None:
        self.lender.give_back(self.borrower.released())
        self.under_way.clear()

    @rule()
    def trim(self) -> None:
        self.lender.trim(FOREVER)

    @invariant()
    def lent_is_what_somebody_uses(self) -> None:
        lent = {number for number, _ in self.ours + self.theirs} | self.under_way
        assert self.lender.lent_bytes == sum(self.lender._lent[number].size for number in lent)


def test_no_block_is_lent_while_anybody_aliases_it() -> None:
    run_state_machine_as_test(Traffic)
