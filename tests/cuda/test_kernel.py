"""The copying kernel: it copies what it is given, whatever its size and place, and then writes the number."""

import ctypes

import pytest
import torch

from telegrad.cuda import host, order
from telegrad.cuda.copy_kernel import MOST_PIECES, copy_and_tell, give_back_counter, take_counter
from telegrad.transport.blocks.mapping import Mapping

GUARD = 32


@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 1000, 65_537, 9_000_001])
def test_pieces_of_any_size_and_place(offset: int, nbytes: int) -> None:
    page = Mapping(-1, 64 * 1024)
    number, counter = host.pinned(page), take_counter(0)
    assert counter, "the kernel was not loaded"
    source = torch.randint(0, 255, (nbytes + GUARD,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    for use in (7, 8):
        pieces = [(source.data_ptr() + offset, target.data_ptr(), nbytes)]
        copy_and_tell(0, order.current_stream(0), pieces, number, use, counter)
        torch.cuda.synchronize()
        assert ctypes.c_uint32.from_address(page.address).value == use
    assert torch.equal(target[:nbytes], source[offset : offset + nbytes])
    assert not target[nbytes:].any(), "more than was asked for"
    give_back_counter(0, counter)


def test_more_pieces_than_one_launch_takes() -> None:
    page = Mapping(-1, 64 * 1024)
    number, counter = host.pinned(page), take_counter(0)
    sources = [torch.rand(100 + index, device="cuda") for index in range(2 * MOST_PIECES + 3)]
    targets = [torch.zeros_like(source) for source in sources]
    pieces = [(s.data_ptr(), t.data_ptr(), s.nbytes) for s, t in zip(sources, targets, strict=True)]
    copy_and_tell(0, order.current_stream(0), pieces, number, 3, counter)
    torch.cuda.synchronize()
    assert ctypes.c_uint32.from_address(page.address).value == 3
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
