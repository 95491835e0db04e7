"""Blocks of memory: lent, released, used again, retired; and given out again when nothing aliases them."""

import ctypes
import os
import time
from pathlib import Path

import pytest

from telegrad.errors import ProtocolError
from telegrad.transport.blocks import MIN_BLOCK, Borrower, Heap, Lender, block_size

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
    assert not lender.has_retired
    lender.give_back([b.number for b in blocks])
    assert lender.has_retired
    assert lender.retired() == (blocks[2].number, blocks[3].number)
    assert lender.retired() == ()
    lender.close()


def _map(borrower: Borrower, number: int, size: int = MIN_BLOCK) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    borrower.map(number, fd, size)


def test_a_borrowed_block_is_released_with_its_last_alias() -> None:
    borrower = Borrower()
    _map(borrower, 3)
    memory = borrower.borrow(3)
    view = memoryview(memory).cast("B")[10:20]
    view[0] = 7
    del memory
    assert borrower.in_use == 1
    assert not borrower.has_released
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
    before = len(os.listdir("/proc/self/fd"))
    borrower = Borrower()
    for size in (0, -1, 2 * MIN_BLOCK, 2**63):
        fd = os.memfd_create("test")
        os.ftruncate(fd, MIN_BLOCK)
        with pytest.raises(ProtocolError):
            borrower.map(1, fd, size)
    assert len(os.listdir("/proc/self/fd")) == before


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
    assert not lender.has_retired
    lender.trim(between)
    assert lender.retired() == (idle.number,)
    lender.trim(between)
    assert not lender.has_retired
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
    lender, borrower, heap = Lender(), Borrower(), Heap()
    block = lender.take(MIN_BLOCK)
    borrower.map(block.number, os.dup(block.fd), block.size)
    heap.allocate(3 * MIN_BLOCK)
    assert len(shared_mappings()) == 2
    lender.give_back([block.number])
    del block
    lender.trim(FOREVER)
    borrower.retire(lender.retired())
    heap.trim(FOREVER)
    assert shared_mappings() == []
    assert heap._idle_bytes == 0


def shared_mappings() -> list[str]:
    """Blocks that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:telegrad" in line]


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
