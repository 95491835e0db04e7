"""Small tensors without a table: they arrive equal, what is not plain takes the other way, and specs that lie fail."""

import sys
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from telegrad.errors import ProtocolError
from telegrad.wire.tensor.small import MOST_BYTES, _plain_form, describe_small, rebuild_small
from telegrad.wire.tensor.specs import DTYPES, NO_SEGMENT, TensorSpec

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TensorSpec]).decode

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)
COPYABLE = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]


def travel(*tensors: Tensor, before: bytes = b"") -> list[Tensor]:
    """The tensors as they arrive behind so many other bytes."""
    described = describe_small(tensors)
    assert described is not None
    specs, data = described
    return rebuild_small(_decode(_encode(specs)), bytearray(before + data), len(before))


@given(st.lists(st.tuples(st.sampled_from(COPYABLE), SHAPES), min_size=1, max_size=4), st.sampled_from([0, 16, 64]))
def test_they_arrive_equal(forms: list[tuple[torch.dtype, tuple[int, ...]]], before: int) -> None:
    sent = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in forms]
    for mine, theirs in zip(travel(*sent, before=bytes(before)), sent, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert bytes(mine.contiguous().view(-1).view(torch.uint8)) == bytes(theirs.view(-1).view(torch.uint8))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_they_keep_what_they_are(requires_grad: bool) -> None:
    tensor, parameter = travel(torch.ones(3, requires_grad=requires_grad), Parameter(torch.ones(2, 2), requires_grad))
    assert type(tensor) is Tensor and type(parameter) is Parameter
    assert tensor.requires_grad == parameter.requires_grad == requires_grad
    assert tensor.is_leaf and parameter.is_leaf


def test_what_arrives_can_be_changed_and_keeps_its_memory() -> None:
    first, second = travel(torch.zeros(3), torch.zeros(5))
    first.add_(1)
    assert torch.equal(first, torch.ones(3)) and torch.equal(second, torch.zeros(5))


shared = torch.ones(8)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(MOST_BYTES // 4 + 1)],
        [torch.ones(MOST_BYTES // 8), torch.ones(MOST_BYTES // 8 + 1)],
        [torch.ones(0)],
        [torch.ones(4, 4).t()],
        [torch.ones(3).expand(2, 3)],
        [shared[:4], shared[4:]],
        [torch.ones(2, dtype=torch.complex64)],
        [torch.ones(2, dtype=torch.complex64).conj().imag],
        [torch.eye(3).to_sparse()],
        [torch.empty(3, device="meta")],
        [torch.ones(2).as_subclass(type("Odd", (Tensor,), {}))],
    ],
    ids=lambda tensors: str([tuple(tensor.shape) for tensor in tensors]),
)
def test_what_is_not_plain_goes_another_way(tensors: list[Tensor]) -> None:
    assert describe_small(tensors) is None


def test_inside_a_transform_the_other_way_says_what_is_wrong() -> None:
    def inside(x: Tensor) -> Tensor:
        assert describe_small([x]) is None
        return x

    torch.vmap(inside)(torch.ones(2, 2))


GOOD = TensorSpec(0, DTYPES.index(torch.float32), (2, 2), (), 0, NO_SEGMENT, 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": 999}, "dtype"),
        ({"dtype": DTYPES.index(torch.complex64)}, "plainest"),
        ({"dtype": DTYPES.index(torch.qint8)}, "plainest"),
        ({"shape": (-1, 2)}, "negative"),
        ({"shape": (0, 2)}, "plainest"),
        ({"shape": (2, 3)}, "24 bytes"),
        ({"shape": (2**30, 2**20)}, "bytes begins at byte 0 of 16"),
        ({"shape": (2**62, 2**62)}, "larger than any memory"),
        ({"strides": (2, 1)}, "plainest"),
        ({"offset": 1}, "plainest"),
        ({"segment": 0}, "plainest"),
        ({"kind": 1}, "plainest"),
        ({"device": "cuda:0"}, "plainest"),
        ({"parts": (1,)}, "plainest"),
        ({"scalars": (1.0,)}, "plainest"),
        ({"flags": 4}, "flags"),
        ({"flags": -1}, "flags"),
        ({"dtype": DTYPES.index(torch.int32), "flags": 1}, "floating"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_specs_that_lie_are_refused(change: dict[str, Any], text: str) -> None:
    assert len(rebuild_small([GOOD], bytearray(16), 0)) == 1
    with pytest.raises(ProtocolError, match=text):
        rebuild_small([msgspec.structs.replace(GOOD, **change)], bytearray(16), 0)


def test_without_numpy_they_arrive_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [torch.rand(2, 3, requires_grad=True), torch.tensor(4), torch.rand(1, 1, 5)]
    _plain_form.cache_clear()
    monkeypatch.setitem(sys.modules, "numpy", None)
    try:
        assert all(map(torch.equal, travel(*sent), sent))
        with pytest.raises(ProtocolError, match="begins at byte 16 of 16"):
            rebuild_small([GOOD, GOOD], bytearray(16), 0)
    finally:
        _plain_form.cache_clear()


def test_no_tensors_are_described() -> None:
    specs, data = describe_small([]) or ([], b"?")
    assert [*specs] == [] and data == b""


def test_more_dimensions_than_numpy_has() -> None:
    (tensor,) = travel(torch.ones([1] * 40 + [2]))
    assert tensor.shape == torch.Size([1] * 40 + [2])


def test_more_tensors_than_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="begins at byte 16 of 16"):
        rebuild_small([GOOD, GOOD], bytearray(16), 0)
