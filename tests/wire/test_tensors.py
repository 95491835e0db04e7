"""Tensors arrive as they were sent, and specs that lie are refused before they touch memory."""

import ctypes
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from telegrad.errors import ProtocolError, SerializationError
from telegrad.wire.tensor import on_device
from telegrad.wire.tensor.specs import DTYPES, QUANTIZED_DTYPES, Flag, TensorKind
from telegrad.wire.tensor.tensors import Segment, TensorSpec, describe, rebuild, segment_bytes, segment_view

# torch announces the end of its quantized tensors, and the prototype state of CSR and nested ones, when one is made
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

many = settings(max_examples=6 * settings().max_examples)

PLAIN_DTYPES = [dtype for dtype in DTYPES if dtype not in QUANTIZED_DTYPES]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TensorSpec]).decode


QUINT8 = DTYPES.index(torch.quint8)


def receive(specs: Sequence[TensorSpec], segments: Sequence[Segment]) -> list[Tensor]:
    return rebuild(_decode(_encode(specs)), [bytearray(segment_bytes(segment)) for segment in segments])


def trip(*tensors: Tensor) -> list[Tensor]:
    return receive(*describe(tensors))


def raw(tensor: Tensor) -> bytes:
    """The elements in order, as bytes: so NaNs and dtypes without arithmetic compare too."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    out = bytearray()
    for index in itertools.product(*map(range, tensor.shape)):
        offset = int(tensor.storage_offset()) + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        address = tensor.untyped_storage().data_ptr() + offset * tensor.itemsize
        out += ctypes.string_at(address, tensor.itemsize)
    return bytes(out)


def assert_same(arrived: Tensor, sent: Tensor, *, alone: bool = True) -> None:
    assert type(arrived) is type(sent)
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.requires_grad == sent.requires_grad
    assert arrived.is_leaf
    assert not alone or not arrived._is_view()
    assert arrived.is_conj() == sent.is_conj()
    assert arrived.is_neg() == sent.is_neg()
    assert raw(arrived) == raw(sent)


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def test_every_dtype_of_torch_has_a_code() -> None:
    known = {value for value in (getattr(torch, name) for name in dir(torch)) if isinstance(value, torch.dtype)}
    assert known == set(DTYPES)
    assert len(DTYPES) == len(set(DTYPES))


def test_dtype_codes_are_the_protocol() -> None:
    assert [DTYPES.index(dtype) for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64)] == [0, 4, 9, 13]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "one column": lambda t: t[:, 1],
    "every other": lambda t: t[::2, ::2],
    "a slice": lambda t: t[1:3],
    "expanded": lambda t: t[:, None, :].expand(4, 3, 6),
    "an expanded column": lambda t: t[:, 1, None].expand(4, 5),
    "overlapping": lambda t: t.as_strided((3, 3), (1, 1), 2),
    "0-d": lambda t: t[2, 3],
    "empty": lambda t: t[:0],
    "empty and transposed": lambda t: t[:0].t(),
    "with a dimension of one": lambda t: t[1:2, :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_dense_tensors_arrive_equal(dtype: torch.dtype, layout: str) -> None:
    sent = LAYOUTS[layout](of_dtype(dtype, 4, 6))
    assert_same(trip(sent)[0], sent)


@pytest.mark.parametrize("layout", ["transposed", "a slice", "expanded", "overlapping", "empty and transposed"])
def test_strides_are_kept(layout: str) -> None:
    sent = LAYOUTS[layout](torch.randn(4, 6))
    assert trip(sent)[0].stride() == sent.stride()


def test_channels_last_is_kept() -> None:
    sent = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    arrived = trip(sent)[0]
    assert arrived.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(arrived, sent)


def test_lazy_conjugate_and_negative_arrive_as_such() -> None:
    value = torch.randn(3, dtype=torch.complex64)
    for sent in (
        value.conj(),
        value.conj().imag,
        torch.randn(9, 9, dtype=torch.complex64).conj()[:, 2],
        torch._neg_view(torch.randn(4)),
    ):
        assert_same(trip(sent)[0], sent)


def test_zero_tensor_of_forward_mode_arrives_as_zeros() -> None:
    assert torch.equal(trip(torch._efficientzerotensor((2, 3)))[0], torch.zeros(2, 3))


def test_parameters_and_requires_grad() -> None:
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    result = torch.nn.Parameter(torch.randn(3)) * 2
    parameter, still_frozen, leaf, result_as_leaf = trip(
        torch.nn.Parameter(torch.randn(2, 2)), frozen, torch.randn(3, requires_grad=True), result
    )
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert isinstance(still_frozen, torch.nn.Parameter)
    assert not still_frozen.requires_grad
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert result_as_leaf.requires_grad
    assert torch.equal(result_as_leaf, result)


def test_a_transposed_parameter_is_a_leaf_parameter() -> None:
    sent = torch.nn.Parameter(torch.randn(2, 3).t())
    assert_same(trip(sent)[0], sent)


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "coo, uncoalesced": lambda t: torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [1, 1, 2]]), torch.ones(3), (4, 6)),
    "coo, hybrid": lambda t: t.to_sparse(1),
    "coo, nothing stored": lambda t: torch.zeros(4, 6).to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 3)),
    "bsc": lambda t: t.to_sparse_bsc((2, 3)),
}


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse_tensors_arrive_equal(layout: str, requires_grad: bool) -> None:
    dense = torch.randn(4, 6) * (torch.rand(4, 6) > 0.5)
    sent = SPARSE[layout](dense).detach().requires_grad_(requires_grad)
    arrived = trip(sent)[0]
    assert arrived.layout == sent.layout
    assert arrived.shape == sent.shape
    assert arrived.requires_grad == requires_grad
    assert torch.equal(arrived.detach().to_dense(), sent.detach().to_dense())
    if sent.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == sent.is_coalesced()
        assert arrived.sparse_dim() == sent.sparse_dim()


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantized_tensors_arrive_equal(dtype: torch.dtype) -> None:
    value = torch.randn(4, 6)
    per_tensor = torch.quantize_per_tensor(value, 0.1, 3, dtype)
    per_channel = torch.quantize_per_channel(value, torch.rand(6) + 0.1, torch.arange(6), 1, dtype)
    strided = torch.quantize_per_tensor(value, 0.1, 3, dtype).t()
    for sent, arrived in zip((per_tensor, per_channel, strided), trip(per_tensor, per_channel, strided), strict=True):
        assert arrived.qscheme() == sent.qscheme()
        assert arrived.stride() == sent.stride()
        assert torch.equal(arrived.int_repr(), sent.int_repr())
        assert torch.equal(arrived.dequantize(), sent.dequantize())


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4], ids=str)
def test_packed_quantized_tensors_arrive_equal(dtype: torch.dtype) -> None:
    sent = torch.quantize_per_channel(torch.randn(4, 6), torch.rand(4) + 0.1, torch.rand(4), 0, dtype)
    arrived = trip(sent)[0]
    assert arrived.dtype == dtype
    assert bytes(arrived.untyped_storage()) == bytes(sent.untyped_storage())
    assert torch.equal(arrived.q_per_channel_scales(), sent.q_per_channel_scales())


def test_meta_tensors_have_no_memory() -> None:
    sent = torch.empty(3, 4, device="meta", dtype=torch.bfloat16).t()
    specs, segments = describe([sent])
    assert segments == []
    arrived = receive(specs, segments)[0]
    assert arrived.is_meta
    assert (arrived.shape, arrived.stride(), arrived.dtype) == (sent.shape, sent.stride(), sent.dtype)


def test_nested_tensors_arrive_equal() -> None:
    sent = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    arrived = trip(sent)[0]
    assert arrived.is_nested
    assert all(torch.equal(a, b) for a, b in zip(arrived.unbind(), sent.unbind(), strict=True))


def test_a_level_of_forward_mode_is_no_matter_to_tensors_that_cannot_have_a_tangent() -> None:
    """It may be another thread's: torch counts the levels of all."""
    others = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    sparse = [to_layout(torch.eye(4, 6)) for to_layout in SPARSE.values()]
    with forward_ad.dual_level():  # type: ignore[no-untyped-call]
        arrived = trip(*sparse, *others)
    assert [tensor.layout for tensor in arrived] == [tensor.layout for tensor in (*sparse, *others)]
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(arrived, sparse, strict=False))


def test_parts_do_not_shift_the_table() -> None:
    first, last = torch.eye(3).to_sparse(), torch.randn(2)
    arrived = trip(first, last)
    assert len(arrived) == 2
    assert torch.equal(arrived[0].to_dense(), torch.eye(3))
    assert torch.equal(arrived[1], last)


# Memory: shared where it was shared, sent from where it lies, and no more than needed.


def test_views_share_memory_on_arrival() -> None:
    base = torch.randn(4, 6)
    whole, transposed, row, as_bytes = trip(base, base.t(), base[1], base.view(torch.uint8)[2])
    row.fill_(7)
    assert torch.equal(transposed[:, 1], torch.full((6,), 7.0))
    as_bytes.zero_()
    assert torch.equal(whole[2], torch.zeros(6))


def test_dtypes_at_odd_offsets_share_memory() -> None:
    base = torch.arange(32, dtype=torch.uint8)
    sent = (base[1:30], base[4:28].view(torch.float32), base[8:24].view(torch.complex64))
    arrived = trip(*sent)
    for mine, theirs in zip(arrived, sent, strict=True):
        assert_same(mine, theirs, alone=False)
    versions = [tensor._version for tensor in arrived]
    arrived[0].zero_()
    assert not arrived[1].any()
    assert [tensor._version for tensor in arrived] == [version + 1 for version in versions]


def test_halves_of_a_storage_travel_as_one_segment() -> None:
    base = torch.randn(10)
    specs, segments = describe([base[:5], base[5:]])
    assert len(segments) == 1
    assert segments[0].nbytes == base.nbytes
    assert {spec.segment for spec in specs} == {0}


@pytest.mark.parametrize(
    ("views", "nbytes"),
    [
        (lambda m: [m[:, 3]], 400),
        (lambda m: [m[:, 3], m[:, 4]], 800),
        (lambda m: [m[3], m[90]], 800),
        (lambda m: [m[:, 3, None].expand(100, 50)], 400),
        (lambda m: [m[10:20, 10:20].t()], 400),
    ],
    ids=["a column", "two columns", "two rows far apart", "an expanded column", "a corner"],
)
def test_only_what_is_shown_is_sent(views: Any, nbytes: int) -> None:
    sent = views(torch.randn(100, 100))
    specs, segments = describe(sent)
    assert sum(segment.nbytes for segment in segments) == nbytes
    for mine, theirs in zip(receive(specs, segments), sent, strict=True):
        assert_same(mine, theirs)


def test_a_row_and_a_column_that_cross_still_share() -> None:
    matrix = torch.zeros(100, 100)
    row, column = trip(matrix[5], matrix[:, 7])
    row[7] = 1
    assert column[5] == 1


def test_host_memory_is_sent_from_where_it_lies() -> None:
    sent = torch.randn(8)
    segment = describe([sent[2:6]])[1][0]
    assert (segment.address, segment.nbytes) == (sent.data_ptr() + 8, 16)


def test_a_segment_keeps_its_memory_alive() -> None:
    view = segment_view(describe([torch.full((1000,), 3.0)])[1][0])
    gc.collect()
    assert bytes(view) == raw(torch.full((1000,), 3.0))


def test_received_tensors_alias_their_buffer_and_keep_it() -> None:
    specs, segments = describe([torch.randn(4), torch.randn(3).expand(2, 3)])
    arrays = [(ctypes.c_char * segment.nbytes).from_buffer_copy(segment_bytes(segment)) for segment in segments]
    ends = [weakref.ref(array) for array in arrays]
    first, second = rebuild(specs, arrays)
    ctypes.memset(arrays[0], 0, 16)
    assert not first.any()
    del arrays
    gc.collect()
    assert all(end() is not None for end in ends)
    view = second[0]
    del first, second
    gc.collect()
    assert ends[0]() is None
    assert ends[1]() is not None
    del view
    gc.collect()
    assert ends[1]() is None


def test_device_of_the_sender_is_mapped() -> None:
    asked: list[str] = []

    def device_for(name: str) -> torch.device:
        asked.append(name)
        return torch.device("cpu")

    specs, segments = describe([torch.arange(4.0), torch.arange(4.0).expand(2, 4)])
    specs = [msgspec.structs.replace(spec, device="cuda:1") for spec in specs]
    first, second = rebuild(specs, [bytearray(segment_bytes(s)) for s in segments], device_for)
    assert set(asked) == {"cuda:1"}
    assert torch.equal(first, torch.arange(4.0))
    assert torch.equal(second[1], torch.arange(4.0))


def test_a_device_that_is_not_here_says_so() -> None:
    specs, segments = describe([torch.arange(4.0)])
    absent = [msgspec.structs.replace(specs[0], device="cuda:63")]
    with pytest.raises(SerializationError, match="cuda:63"):
        receive(absent, segments)


def test_what_cannot_be_sent_is_named() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(SerializationError, match=r"Odd of shape \(2,\)"):
        describe([torch.ones(2), torch.ones(2).as_subclass(Odd)])
    with pytest.raises(SerializationError, match="to_dense"):
        describe([torch.randn(2, 2).to_mkldnn()])
    with pytest.raises(SerializationError, match="UninitializedParameter"):
        describe([torch.nn.UninitializedParameter()])

    def inside(x: Tensor) -> Tensor:
        with pytest.raises(SerializationError, match=r"torch\.func"):
            describe([x])
        return x

    torch.vmap(inside)(torch.ones(3))


# What a peer may not say.

GOOD = TensorSpec(TensorKind.DENSE, 0, (2, 2), (), 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": 99}, "unknown kind 99"),
        ({"dtype": 999}, "unknown dtype code 999"),
        ({"dtype": -1}, "unknown dtype code -1"),
        ({"dtype": DTYPES.index(torch.qint8)}, "DENSE of torch.qint8"),
        ({"shape": (2, -2)}, "negative size"),
        ({"shape": (2**40, 2**40)}, "larger than any memory"),
        ({"shape": (0, 2**40, 2**40), "segment": -1}, "larger than any memory"),
        ({"shape": (1,) * 2000}, "2000 dimensions"),
        ({"shape": (2, 3)}, "ends at byte 24 of segment 0, which has 16"),
        ({"strides": (2,)}, "1 strides for 2 dimensions"),
        ({"strides": (-2, 1)}, "out of range"),
        ({"strides": (2**62, 2**62)}, "beyond any memory"),
        ({"strides": (2, 2)}, "ends at byte 20"),
        ({"offset": 1}, "ends at byte 20"),
        ({"offset": -1}, "negative offset"),
        ({"offset": 2**64}, "ends at byte"),
        ({"segment": 1}, "segment 1 of 1"),
        ({"segment": -1}, "segment -1 of 1"),
        ({"flags": 1 << 20}, "unknown flags"),
        ({"flags": -1}, "unknown flags"),
        ({"dtype": DTYPES.index(torch.int32), "flags": int(Flag.REQUIRES_GRAD)}, "require gradients"),
        ({"device": "nowhere:x"}, "not a device"),
        ({"device": "meta"}, "meta device"),
        ({"parts": (0,)}, "DENSE with 1 parts"),
        ({"scalars": (1.0,)}, "1 scalars"),
        ({"kind": TensorKind.META}, "needs no memory"),
        ({"kind": TensorKind.SPARSE_COO, "parts": (0, 1)}, "0 is not the index of a part"),
        ({"kind": TensorKind.SPARSE_COO, "parts": (1, 7), "segment": -1}, "7 is not the index of a part"),
        ({"kind": TensorKind.SPARSE_COO, "parts": (1, 1), "segment": -1}, "already belongs"),
        ({"kind": TensorKind.SPARSE_COO, "parts": (1, 2), "segment": -1}, "torch refuses"),
        (
            {"kind": TensorKind.QUANTIZED, "scalars": (1.0, float("inf")), "dtype": QUINT8},
            "refuses",
        ),
        (
            {
                "kind": TensorKind.QUANTIZED_CHANNELS,
                "scalars": (5.0,),
                "parts": (1, 2),
                "dtype": QUINT8,
            },
            "do not fit",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_specs_that_lie_are_refused(change: dict[str, Any], text: str) -> None:
    parts = [GOOD, GOOD] if change.get("parts") else []
    with pytest.raises(ProtocolError, match=text):
        rebuild([msgspec.structs.replace(GOOD, **change), *parts], [bytearray(16)])


def test_sparse_indices_out_of_range_are_refused() -> None:
    specs, segments = describe([torch.eye(3).to_sparse()])
    buffers = [bytearray(segment_bytes(segment)) for segment in segments]
    buffers[specs[1].segment][0:8] = (10**6).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="torch refuses"):
        rebuild(specs, buffers)


def corpus() -> list[tuple[list[TensorSpec], list[Segment]]]:
    dense = torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            describe([dense, torch.randn(2)]),
            describe([dense, dense.t(), dense[1]]),
            describe([torch.eye(3).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_bsc((2, 2))]),
            describe([torch.quantize_per_tensor(dense, 0.1, 3, torch.quint8)]),
            describe([torch.quantize_per_channel(dense, torch.rand(6) + 1, torch.zeros(6), 1, torch.quint8)]),
            describe([torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]), torch.empty(2, device="meta")]),
        ]


CORPUS = corpus()
NUMBERS = st.one_of(
    st.integers(-3, 12), st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
)
SIZES = st.lists(NUMBERS, max_size=4).map(tuple)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "kind": NUMBERS,
    "dtype": st.integers(-1, len(DTYPES)),
    "shape": SIZES,
    "strides": SIZES,
    "offset": NUMBERS,
    "segment": NUMBERS,
    "flags": st.one_of(st.integers(0, 31), NUMBERS),
    "device": st.sampled_from(["", "cpu", "meta", "cuda", "x", "cpu:7"]),
    "parts": SIZES,
    "scalars": st.lists(st.floats(), max_size=3).map(tuple),
}


@st.composite
def mutated(draw: st.DrawFn) -> tuple[list[TensorSpec], list[Segment]]:
    specs, segments = draw(st.sampled_from(CORPUS))
    specs = list(specs)
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(specs) - 1))
        field = draw(st.sampled_from(sorted(FIELDS)))
        specs[index] = msgspec.structs.replace(specs[index], **{field: draw(FIELDS[field])})
    return specs, segments


def touch(tensor: Tensor) -> None:
    """Read every element, so that one beyond the memory would show under a checker of memory."""
    if tensor.is_meta:
        return
    if tensor.is_nested:
        for part in tensor.unbind():
            touch(part)
    elif tensor.layout is torch.strided and tensor.dtype not in QUANTIZED_DTYPES:
        storage = tensor.untyped_storage()
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            assert (int(tensor.storage_offset()) + last + 1) * tensor.itemsize <= storage.nbytes()


@pytest.mark.slow
@many
@given(mutated())
def test_mutated_specs_are_refused_or_stay_within_bounds(message: tuple[list[TensorSpec], list[Segment]]) -> None:
    specs, segments = message
    buffers = [bytearray(segment_bytes(segment)) for segment in segments]
    try:
        tensors = rebuild(specs, buffers)
    except (ProtocolError, SerializationError):
        return
    for tensor in tensors:
        touch(tensor)


@st.composite
def views_of_one_storage(draw: st.DrawFn) -> list[Tensor]:
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.complex128, torch.bfloat16, torch.int64]))
    base = of_dtype(dtype, draw(st.integers(1, 200)))
    views = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(0, 4), max_size=4))
        strides = [draw(st.integers(0, 20)) for _ in sizes]
        reach = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(sizes, strides, strict=True))
        if reach <= base.numel():
            views.append(base.as_strided(sizes, strides, draw(st.integers(0, base.numel() - reach))))
    return views


@many
@given(views_of_one_storage(), st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=2))
def test_any_views_arrive_equal(views: list[Tensor], shapes: list[list[int]]) -> None:
    sent = [*views, *(torch.randn(shape) for shape in shapes)]
    specs, segments = describe(sent)
    for mine, theirs in zip(receive(specs, segments), sent, strict=True):
        assert_same(mine, theirs, alone=False)


@many
@given(views_of_one_storage())
def test_writes_through_one_view_show_in_all(views: list[Tensor]) -> None:
    arrived = trip(*views)
    for mine, theirs in zip(arrived, views, strict=True):
        if mine.numel():
            index = (0,) * mine.dim()
            mine[index] = 1
            theirs[index] = 1
    for mine, theirs in zip(arrived, views, strict=True):
        assert raw(mine) == raw(theirs)


@pytest.mark.parametrize("kind", [0, 1, 7])
def test_what_is_odd_about_tensors_on_a_gpu_is_not_remembered(kind: int) -> None:
    before = len(on_device._known)
    for last in (1, 2, 3):
        spec = TensorSpec(kind, 0, (1,) * 100_000 + (last,), (), 0, 0, 0, "cuda:0")
        with pytest.raises(ProtocolError):
            rebuild([spec], [memoryview(bytearray(4 * last))])
    assert len(on_device._known) == before
