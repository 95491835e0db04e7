"""The commonest message with CUDA tensors: each contiguous, with a storage of its own, all of it on the GPU on arrival.

Everything else about tensors on a GPU goes the general way, as on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from telegrad.cuda import order
from telegrad.wire.tensor.assembly import checked_size, dtype_of, finish
from telegrad.wire.tensor.segments import Segment
from telegrad.wire.tensor.small import PLAIN_CODES
from telegrad.wire.tensor.specs import QUANTIZED_DTYPES, Flag, TensorSpec

# Plain ints: arithmetic on enums costs a microsecond.
_REQUIRES_GRAD = int(Flag.REQUIRES_GRAD)
_PARAMETER = int(Flag.PARAMETER)
_SIMPLE_FLAGS = _REQUIRES_GRAD | _PARAMETER


def describe_on_device(tensors: Sequence[Tensor]) -> tuple[list[TensorSpec], list[Segment]] | None:
    """Specs and segments of plain CUDA tensors; None if one of them is anything else."""
    specs: list[TensorSpec] = []
    segments: list[Segment] = []
    storages = set()
    try:
        for index, tensor in enumerate(tensors):
            cls = type(tensor)
            if (
                not (cls is Tensor or cls is Parameter)
                or not tensor.is_cuda
                or tensor.layout is not torch.strided
                or tensor.is_nested
                or not tensor.is_contiguous()
                or tensor.is_neg()
            ):
                return None
            code = PLAIN_CODES.get(tensor.dtype)
            storages.add(tensor.untyped_storage()._cdata)
            address = tensor.data_ptr()
            if code is None or not address or len(storages) <= index:
                return None
            device = tensor.get_device()
            order.use(device)
            flags = _REQUIRES_GRAD if tensor.requires_grad else 0
            if cls is Parameter:
                flags |= _PARAMETER
            specs.append(TensorSpec(0, code, tuple(tensor.shape), (), 0, index, flags, _name_of(device)))
            segments.append(Segment(address, tensor.nbytes, tensor, False, device))
    except RuntimeError:
        return None  # torch refused to show this tensor's memory; the general way tells why
    return specs, segments


def rebuild_on_device(specs: Sequence[TensorSpec], buffers: Sequence[Any]) -> list[Tensor] | None:
    """The tensors that `describe_on_device` could have described and that came in device memory; None for others."""
    forms = []
    for index, spec in enumerate(specs):
        if (
            spec.segment != index
            or index >= len(buffers)
            or not hasattr(buffers[index], "copy_to")
            or not spec.device.startswith("cuda:")
            or spec.kind
            or spec.strides
            or spec.offset
            or spec.parts
            or spec.scalars
            or not 0 <= spec.flags <= _SIMPLE_FLAGS
        ):
            return None
        dtype, nbytes = simple_form(spec.dtype, spec.shape)
        device = _device_of(spec.device)
        if not nbytes or nbytes != buffers[index].nbytes or device is None:
            return None
        forms.append((dtype, device))
    tensors = []
    for spec, buffer, (dtype, device) in zip(specs, buffers, forms, strict=False):
        tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        buffer.copy_to(tensor.data_ptr(), device)
        tensors.append(finish(tensor, spec.flags) if spec.flags else tensor)
    return tensors


@functools.lru_cache(maxsize=64)
def _name_of(device: int) -> str:
    return f"cuda:{device}"


@functools.lru_cache(maxsize=64)
def _device_of(name: str) -> torch.device | None:
    """The device of that name if this process has it; else the general way says what is wrong."""
    try:
        device = torch.device(name)
        if device.index is None or device.index >= torch.cuda.device_count():
            return None
    except RuntimeError:
        return None
    order.use(device.index)
    return device


@functools.lru_cache(maxsize=4096)
def simple_form(code: int, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
    """The dtype and byte count of a dense tensor; 0 bytes where the common case does not hold."""
    dtype = dtype_of(code)
    nbytes = checked_size(shape, dtype)
    return dtype, 0 if 0 in shape or dtype in QUANTIZED_DTYPES else nbytes
