"""What describes a tensor on the wire: its spec, the kinds and flags it may name, and the numbering of dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Any

import msgspec
import torch


class TensorKind(IntEnum):
    """How a tensor is put together, and from which parts."""

    DENSE = 0  # memory, shape, strides
    SPARSE_COO = 1  # parts: indices, values
    SPARSE_CSR = 2  # parts: compressed indices, plain indices, values; so too the next three
    SPARSE_CSC = 3
    SPARSE_BSR = 4
    SPARSE_BSC = 5
    QUANTIZED = 6  # memory; scalars: scale, zero point
    QUANTIZED_CHANNELS = 7  # memory; parts: scales, zero points; scalars: axis
    META = 8  # shape and strides, no memory
    NESTED = 9  # parts: the tensors it holds


class Flag(IntFlag):
    """What else is true of a tensor."""

    REQUIRES_GRAD = 1
    PARAMETER = 2
    CONJ = 4
    NEG = 8
    COALESCED = 16


# A dtype travels as its position here. Append only: the positions are part of the protocol.
DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    *(torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4),
    *(torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2),
    # torch's stubs lack the integers narrower than a byte
    *(getattr(torch, f"int{bits}") for bits in range(1, 8)),
    *(getattr(torch, f"uint{bits}") for bits in range(1, 8)),
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# Elements per byte of the quantized dtypes that are narrower than one.
PACKED_DTYPES = {torch.quint4x2: 2, torch.quint2x4: 4}
QUANTIZED_DTYPES = {torch.qint8, torch.quint8, torch.qint32, *PACKED_DTYPES}

COMPRESSED_KINDS: dict[Any, TensorKind] = {
    torch.sparse_csr: TensorKind.SPARSE_CSR,
    torch.sparse_csc: TensorKind.SPARSE_CSC,
    torch.sparse_bsr: TensorKind.SPARSE_BSR,
    torch.sparse_bsc: TensorKind.SPARSE_BSC,
}
KINDS_WITH_MEMORY = {TensorKind.DENSE, TensorKind.QUANTIZED, TensorKind.QUANTIZED_CHANNELS}

NO_SEGMENT = -1


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Everything but the bytes of one tensor. Empty strides mean contiguous; an empty device means the CPU."""

    kind: int
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    segment: int
    flags: int
    device: str = ""
    parts: tuple[int, ...] = ()
    scalars: tuple[float, ...] = ()


def written_out(tensors: Sequence[TensorSpec]) -> int:
    """Bytes of tensors as they are to whoever computes with them; a sparse or expanded one has few of its own."""
    return sum([math.prod(spec.shape) * _itemsize(spec.dtype) for spec in tensors])


def _itemsize(code: int) -> int:
    return DTYPES[code].itemsize if 0 <= code < len(DTYPES) else 0  # what is wrong with it is found when it is built
