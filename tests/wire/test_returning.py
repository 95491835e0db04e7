"""Which tensors of a reply may go back without a copy: those that came with the request and that nobody else can see.

Each way to hold a tensor counts against it. Were one overlooked, its holder would see what the caller does with the
result, or the caller what the holder does.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from telegrad.wire.tensor.returning import WORTHWHILE, mark_spare, storages_of
from telegrad.wire.tensor.tensors import describe, rebuild

LARGE = WORTHWHILE // 4  # floats


def arrived(*sizes: int) -> list[Tensor]:
    """Tensors as they come with a request."""
    specs, segments = describe([torch.zeros(size) for size in sizes])
    return rebuild(specs, [bytearray(segment.nbytes) for segment in segments])


def spare(tensors: list[Tensor], came: frozenset[int] | None = None) -> list[bool]:
    """Which of a reply's segments are marked; all tensors came with the request, unless told otherwise."""
    _, segments = describe(tensors)
    marked = mark_spare(tensors, segments, storages_of(tensors) if came is None else came)
    assert [(s.address, s.nbytes) for s in marked] == [(s.address, s.nbytes) for s in segments]
    return [segment.spare for segment in marked]


def saved_for_backward(x: Tensor) -> Tensor:
    return torch.ones(LARGE, requires_grad=True) * x


def in_a_future(x: Tensor) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(x)
    return future


def in_a_generator(x: Tensor) -> Iterator[Tensor]:
    def later() -> Iterator[Any]:
        yield None
        yield x

    begun = later()
    next(begun)
    return begun


def in_a_traceback(x: Tensor) -> BaseException:
    try:
        raise ValueError(x.shape)
    except ValueError as error:
        return error


def in_a_thread(x: Tensor) -> Callable[[], None]:
    go_on, begun = threading.Event(), threading.Event()

    def look(mine: Tensor) -> None:
        begun.set()
        go_on.wait(60)
        mine.sum()

    thread = threading.Thread(target=look, args=(x,))
    thread.start()
    begun.wait(60)

    def end() -> None:
        go_on.set()
        thread.join(60)

    return end


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda x: x,
    "a list": lambda x: [x],
    "a key": lambda x: {x: 1},
    "a closure": lambda x: lambda: x,
    "a bound method": lambda x: x.sum,
    "a generator": in_a_generator,
    "a traceback": in_a_traceback,
    "a future": in_a_future,
    "a weak reference": weakref.ref,
    "a view": lambda x: x[:1],
    "a reshaped view": lambda x: x.view(2, -1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "a parameter": torch.nn.Parameter,
    "its storage": lambda x: x.untyped_storage(),
    "its typed storage": lambda x: x.storage(),
    "a tensor over its storage": lambda x: torch.empty(0).set_(x.untyped_storage()),
    "a numpy array": lambda x: x.numpy(),
    "a view of a numpy array": lambda x: np.asarray(x)[3:],
    "a memoryview": lambda x: memoryview(x.numpy()),
    "a tensor over a numpy array": lambda x: torch.from_numpy(x.numpy()),
    "a dlpack capsule": torch.utils.dlpack.to_dlpack,
    "an array by dlpack": np.from_dlpack,
    "a tensor by dlpack": torch.from_dlpack,
    "a node that saved it": saved_for_backward,
}


def test_what_nobody_else_holds_is_spare() -> None:
    assert spare(arrived(LARGE)) == [True]
    assert spare(arrived(LARGE, 2 * LARGE, LARGE)) == [True] * 3


def test_what_was_changed_in_place_is_spare() -> None:
    tensors = arrived(LARGE)
    tensors[0].add_(1).mul_(2)
    assert spare(tensors) == [True]


@pytest.mark.parametrize("way", HOLDERS)
def test_what_somebody_holds_is_not_spare(way: str) -> None:
    """And is again, once that one has let go: so it is this holder that was counted, and nothing else."""
    tensors = arrived(LARGE, LARGE)
    held = HOLDERS[way](tensors[0])
    assert spare(tensors) == [False, True]
    del held
    assert spare(tensors) == [True, True]


def test_what_a_thread_looks_at_is_not_spare() -> None:
    tensors = arrived(LARGE)
    end = in_a_thread(tensors[0])
    try:
        assert spare(tensors) == [False]
    finally:
        end()
    assert spare(tensors) == [True]


def test_a_result_that_its_own_node_saved_is_not_spare() -> None:
    """The node needs it as it is when the gradient comes."""
    tensors = arrived(LARGE)
    came = storages_of(tensors)
    kept = tensors[0].copy_(torch.ones(LARGE, requires_grad=True)).exp_().sum()
    assert spare(tensors, came) == [False]
    assert kept.requires_grad


def test_a_view_goes_back_as_a_copy() -> None:
    """torch keeps with it what it is a view of."""
    tensors = arrived(2 * LARGE)
    came = storages_of(tensors)
    tensors[0] = tensors[0][LARGE:]
    assert spare(tensors, came) == [False]


def test_small_ones_are_copied() -> None:
    assert spare(arrived(LARGE - 1, LARGE, 1)) == [False, True, False]
    tensors = arrived(LARGE)
    came = storages_of(tensors)
    tensors[0].resize_(10)
    assert spare(tensors, came) == [False]


def test_what_did_not_come_with_the_request_is_not_spare() -> None:
    """It may lie in memory that came with another one, and that its sender still counts on."""
    came, others = arrived(LARGE), arrived(LARGE)
    assert spare(others, storages_of(came)) == [False]
    assert spare([torch.ones(LARGE)], storages_of(came)) == [False]


def test_tensors_that_share_memory_are_copied() -> None:
    """They travel as one piece of memory, to share it again on arrival."""
    tensors = arrived(LARGE, LARGE)
    came = storages_of(tensors)
    tensors.append(tensors[0].view(2, -1))
    assert spare(tensors, came) == [False, False]  # two pieces for three tensors


@pytest.mark.parametrize("make", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_what_has_no_storage_has_none_that_came(make: str) -> None:
    assert storages_of([getattr(torch.ones(2, LARGE), make)()]) == frozenset()


def test_what_is_not_laid_out_plainly_is_copied() -> None:
    tensors = arrived(LARGE)
    came = storages_of(tensors)
    tensors[0] = tensors[0].view(2, -1).t()
    assert spare(tensors, came) == [False]
    tensors = arrived(LARGE)
    came = storages_of(tensors)
    tensors[0] = torch.sparse_coo_tensor(torch.arange(LARGE)[None], tensors[0], (LARGE,))
    assert spare(tensors, came) == [False, False]
