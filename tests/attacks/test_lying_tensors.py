"""Tensors, plain data and sizes that lie: what a few bytes may cost the worker that reads them."""

import itertools
import math
import struct

import msgspec
import pytest
import torch

from telegrad.errors import ProtocolError, SerializationError
from telegrad.wire import plain
from telegrad.wire.codec import is_modest, pack_plain, unpack
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import HEADER, LENGTHS, MAGIC, MAX_FRAME, VERSION, WITH_MEMORY, max_record
from telegrad.wire.tensor.specs import DTYPE_CODES, TensorKind, TensorSpec
from telegrad.wire.tensor.tensors import rebuild
from tests.attacks.strangers import memory_mb

_encode = msgspec.msgpack.encode
INT64, FLOAT64, FLOAT32 = (DTYPE_CODES[dtype] for dtype in (torch.int64, torch.float64, torch.float32))
MERSENNE = 2**61 - 1  # numbers that differ by it have one hash


def _part(code: int, shape: tuple[int, ...], *, strides: tuple[int, ...] = (), segment: int = 0) -> TensorSpec:
    return TensorSpec(TensorKind.DENSE, code, shape, strides, 0, segment, 0)


def _whole(kind: TensorKind, code: int, shape: tuple[int, ...], parts: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(kind, code, shape, (), 0, -1, 0, "", parts)


# --- indices that another tensor shows as well: torch looks at them once ---


@pytest.mark.parametrize("apart", [False, True], ids=["one segment", "two segments over one memory"])
def test_indices_of_a_sparse_tensor_are_its_own(apart: bool) -> None:
    """A function that changed the values in place led the indices out of the tensor, and torch wrote there."""
    memory = bytearray(struct.pack("<qq", 0, 1))
    specs = [_whole(TensorKind.SPARSE_COO, FLOAT64, (4,), (1, 2)), _part(INT64, (1, 2))]
    specs.append(_part(FLOAT64, (2,), segment=int(apart)))
    (sparse,) = rebuild(specs, [memory, memoryview(memory)])
    sparse._values().fill_(1.0)
    assert sparse._indices().tolist() == [[0, 1]]
    assert sparse.to_dense().tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_indices_of_a_compressed_tensor_are_its_own() -> None:
    memory = bytearray(struct.pack("<qqq", 0, 1, 2))
    specs = [
        _whole(TensorKind.SPARSE_CSR, FLOAT64, (2, 3), (2, 3, 4)),
        _part(INT64, (3,)),  # a tensor beside it, in the memory of its indices
        _part(INT64, (3,)),
        _part(INT64, (2,)),
        _part(FLOAT64, (2,), segment=1),
    ]
    sparse, beside = rebuild(specs, [memory, bytearray(16)])
    beside.fill_(1 << 40)
    assert sparse.crow_indices().tolist() == [0, 1, 2] and sparse.col_indices().tolist() == [0, 1]


# --- a few bytes that become many ---


def test_parts_of_a_nested_tensor_that_repeat_themselves() -> None:
    """It is copied as it is put together: four bytes became two gigabytes."""
    specs = [_whole(TensorKind.NESTED, FLOAT32, (), (1,)), _part(FLOAT32, (1 << 29,), strides=(0,))]
    before = memory_mb()
    with pytest.raises(ProtocolError, match="repeats"):
        rebuild(specs, [bytearray(4)])
    assert memory_mb() - before < 100


def test_parts_of_a_nested_tensor_of_any_form() -> None:
    parts = [torch.arange(6.0).view(2, 3).t(), torch.zeros(0, 2), torch.ones(1, 2)[:, :2], torch.ones(2).expand(3, 2)]
    nested = torch.nested.as_nested_tensor([part.contiguous() for part in parts])
    packed = pack_plain([nested])
    from telegrad.wire.tensor.tensors import describe, segment_view

    specs, segments = describe(packed.tensors)
    (arrived,) = rebuild(specs, [bytearray(segment_view(segment)) for segment in segments])
    assert [part.tolist() for part in arrived.unbind()] == [part.tolist() for part in parts]


def _bomb(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + b"\x00" + b"\x90" * (count - 1)


def test_empty_lists_without_end() -> None:
    """Twenty megabytes of them took 1.6 GB and eight seconds of the interpreter."""
    before = memory_mb()
    for raw in (_bomb(20_000_000), b"\x91" * 2 + _bomb(20_000_000)):
        with pytest.raises(ProtocolError):
            plain.decode(raw, [])
    with pytest.raises(ProtocolError):
        unpack(b"\x03\x01\x00" + _bomb(1_000_000), [])  # where scalars are expected
    assert not is_modest(b"\x03\x01\x00\x91" + _bomb(20_000_000))
    assert memory_mb() - before < 100


def test_much_data_and_few_values() -> None:
    large = ["x" * plain.MOST_VALUES, bytes(2 * plain.MOST_VALUES), {"a": (1, 2)}]
    raw, _ = plain.encode(large)
    assert plain.decode(raw, []) == large
    with pytest.raises(SerializationError, match="as a tensor"):
        plain.encode([0] * (plain.MOST_VALUES + 1))


_FLOODS = {
    "tuples": [[plain.TUPLE, *key] for key in itertools.product((-1, -2), repeat=12)],  # these two have one hash
    "large numbers": [[plain.BIG, hex(MERSENNE * number)] for number in range(10, 4000)],
}


@pytest.mark.parametrize("keys", _FLOODS.values(), ids=_FLOODS)
def test_keys_of_one_hash(keys: list[object]) -> None:
    """A few hundred kilobytes of them kept the interpreter for minutes: each is compared with all others."""
    assert len({hash(plain.decode(_encode(key), [])) for key in keys}) == 1
    pairs = [part for key in keys for part in (key, 0)]
    for raw in (_encode([plain.DICT, *pairs]), _encode([plain.SET, *keys]), _encode([plain.FROZENSET, *keys])):
        with pytest.raises(ProtocolError, match="keys"):
            plain.decode(raw, [])
    assert len(plain.decode(_encode([plain.SET, *keys[: plain.MOST_CHOSEN_KEYS]]), [])) == plain.MOST_CHOSEN_KEYS


def test_many_keys_that_are_not_chosen() -> None:
    value = {**{f"key {n}": n for n in range(3000)}, **{n * (1 << 40): n for n in range(3000)}, 0.5: b""}
    raw, _ = plain.encode(value)
    assert plain.decode(raw, []) == value


def test_a_record_is_bounded_by_what_is_taken_of_others() -> None:
    """Decoded, a table of tensors is twenty times as large."""
    assert max_record(MAX_FRAME) > max_record(1 << 30) == max_record(1 << 16) == 4 << 20
    reader = FrameReader(max_frame=1 << 30)
    header = HEADER.pack(MAGIC, VERSION, WITH_MEMORY, (4 << 20) + 1) + LENGTHS.pack(0, 0)
    reader.target[: len(header)] = header
    with pytest.raises(ProtocolError, match="record"):
        reader.received(len(header))


def test_sizes_that_cancel_each_other() -> None:
    """Negative sizes are refused before anything is built, so that nobody takes them from the sum of others."""
    specs = [_part(FLOAT32, (1 << 40,), strides=(0,)), _part(FLOAT32, (-(1 << 40),), strides=(0,))]
    assert math.prod(specs[0].shape) + math.prod(specs[1].shape) == 0
    with pytest.raises(ProtocolError, match="negative size"):
        rebuild(specs, [bytearray(4)])
