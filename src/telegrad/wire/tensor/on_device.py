"""The commonest message with CUDA tensors: each with a storage of its own and no gaps in it, all on the GPU on arrival.

Contiguous ones, transposed ones, and expanded ones, as the gradient of a sum is. Everything else about tensors on a GPU
goes the general way, as on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from telegrad.cuda import order
from telegrad.cuda.forms import Form, empty
from telegrad.wire.tensor.assembly import checked_size, dtype_of, finish
from telegrad.wire.tensor.segments import HOST, Segment, element_span
from telegrad.wire.tensor.small import PLAIN_CODES
from telegrad.wire.tensor.specs import QUANTIZED_DTYPES, Flag, TensorSpec

# Plain ints: arithmetic on enums costs a microsecond.
_REQUIRES_GRAD = int(Flag.REQUIRES_GRAD)
_PARAMETER = int(Flag.PARAMETER)
_SIMPLE_FLAGS = _REQUIRES_GRAD | _PARAMETER
_MOST_STRIDE = 2**40  # no GPU has as much memory
_MOST_DIMS = 64  # of a tensor, in torch
_MOST_NAME = 16  # characters of a device
_MOST_KNOWN = 1024


_Kind = tuple[torch.dtype, torch.Size, bool, torch.layout]
_kind: Callable[[Tensor], _Kind] = attrgetter("dtype", "shape", "requires_grad", "layout")


def describe_on_device(tensors: Sequence[Tensor]) -> tuple[list[TensorSpec], list[Segment]] | None:
    """Specs and segments of plain CUDA tensors; None if one of them is anything else."""
    if forward_ad._current_level >= 0:
        return None  # any of them may have a tangent
    try:
        if len(tensors) == 1:
            only = _describe_one(tensors[0], 0)
            return None if only is None else ([only[0]], [only[1]])
        specs: list[TensorSpec] = []
        segments: list[Segment] = []
        for index, tensor in enumerate(tensors):
            described = _describe_one(tensor, index)
            if described is None:
                return None
            specs.append(described[0])
            segments.append(described[1])
    except RuntimeError:
        return None  # torch refused to show this tensor's memory; the general way tells why
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(specs):
        return None
    return specs, segments


def _describe_one(tensor: Tensor, index: int) -> tuple[TensorSpec, Segment] | None:
    device = tensor.get_device() if tensor.is_cuda else HOST
    # The shape of a nested tensor cannot be asked for, so such a one ends here.
    form = _form_on_device(type(tensor), _kind(tensor), device, index)
    address = tensor.data_ptr()
    if form is None or not address or tensor.is_neg():
        return None
    spec, nbytes = form
    if not tensor.is_contiguous():
        strides = tensor.stride()
        nbytes = _span_without_gaps(tensor.shape, strides) * tensor.itemsize
        if not nbytes:
            return None
        spec = _with_strides(spec, strides)
    return spec, Segment(address, nbytes, tensor, False, device)


@functools.lru_cache(maxsize=4096)
def _form_on_device(cls: type, kind: _Kind, device: int, index: int) -> tuple[TensorSpec, int] | None:
    """The spec of a contiguous tensor, the one of that index in its message, and its bytes; None if it is not plain."""
    dtype, shape, requires_grad, layout = kind
    code = PLAIN_CODES.get(dtype)
    if code is None or (cls is not Tensor and cls is not Parameter) or layout is not torch.strided or device == HOST:
        return None
    order.use(device)
    flags = _REQUIRES_GRAD * requires_grad | _PARAMETER * (cls is Parameter)
    spec = TensorSpec(0, code, tuple(shape), (), 0, index, flags, f"cuda:{device}")
    return spec, math.prod(shape) * dtype.itemsize


@functools.lru_cache(maxsize=4096)
def _with_strides(spec: TensorSpec, strides: tuple[int, ...]) -> TensorSpec:
    return msgspec.structs.replace(spec, strides=strides)


class Came(NamedTuple):
    """What a spec says that `describe_on_device` could have made."""

    form: Form
    device: torch.device
    nbytes: int


_known: dict[TensorSpec, Came] = {}  # what peers have said before, and it was looked at then: few, and small


def came_as(spec: TensorSpec) -> Came | None:
    """None for any other spec; of what peers say, so with every doubt."""
    found = _known.get(spec)
    if found is None and (found := _looked_at(spec)) is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[spec] = found
    return found


def _looked_at(spec: TensorSpec) -> Came | None:
    if (
        spec.kind
        or spec.offset
        or spec.parts
        or spec.scalars
        or not 0 <= spec.flags <= _SIMPLE_FLAGS
        or len(spec.shape) > _MOST_DIMS
        or len(spec.strides) > _MOST_DIMS
        or not spec.device.startswith("cuda:")
        or len(spec.device) > _MOST_NAME
    ):
        return None
    dtype, nbytes = simple_form(spec.dtype, spec.shape)
    if spec.strides and nbytes:
        nbytes = _strided_bytes(spec.shape, spec.strides, dtype.itemsize)
    device = device_of(spec.device)
    return Came(Form(dtype, spec.shape, spec.strides), device, nbytes) if nbytes and device is not None else None


def rebuild_on_device(specs: Sequence[TensorSpec], buffers: Sequence[Any]) -> list[Tensor] | None:
    """The tensors that `describe_on_device` could have described and that came in device memory; None for others."""
    if len(buffers) != len(specs):
        return None
    if len(specs) == 1:
        return _rebuild_one(specs[0], buffers[0])
    came: list[Came] = []
    alike = True  # whether all came in the same way, to the same GPU
    for index, spec in enumerate(specs):
        one, buffer = came_as(spec), buffers[index]
        granted = getattr(buffer, "granted", None)
        if one is None or spec.segment != index or granted is None or one.nbytes != buffer.nbytes:
            return None
        if index:
            alike = alike and one.device == came[0].device and granted is buffers[0].granted
        came.append(one)
    tensors = (_take if alike else _take_each)(came, buffers)
    if tensors is None:
        return None
    return [finish(tensor, spec.flags) if spec.flags else tensor for spec, tensor in zip(specs, tensors, strict=True)]


def _rebuild_one(spec: TensorSpec, buffer: Any) -> list[Tensor] | None:
    """The same for the usual message, which has one tensor."""
    came = came_as(spec)
    granted = getattr(buffer, "granted", None)
    if came is None or spec.segment or granted is None or came.nbytes != buffer.nbytes:
        return None
    form, device, _ = came
    if not granted:
        tensor = empty(form, device)
        buffer.loan.copy_all([buffer], [tensor.data_ptr()], device)
    elif buffer.device == device.index:
        tensor = buffer.tensor(form)
    else:
        return None
    buffer.expect([form], device)
    return [finish(tensor, spec.flags) if spec.flags else tensor]


def _take(came: Sequence[Came], buffers: Sequence[Any]) -> list[Tensor] | None:
    """All that the sender wrote to memory of this process, or copies of all that came in one block."""
    first, device = buffers[0], came[0].device
    forms = [one.form for one in came]
    if first.granted:
        for buffer in buffers:
            if buffer.device != device.index:
                return None  # the general way looks at each by itself
        tensors = [buffer.tensor(form) for buffer, form in zip(buffers, forms, strict=True)]
    else:
        for buffer in buffers:
            if buffer.loan is not first.loan:
                return _take_each(came, buffers)
        tensors = [empty(form, device) for form in forms]
        first.loan.copy_all(buffers, [tensor.data_ptr() for tensor in tensors], device)
    first.expect(forms, device)
    return tensors


def _take_each(came: Sequence[Came], buffers: Sequence[Any]) -> list[Tensor] | None:
    """The same for what came in several blocks, or goes to several GPUs."""
    if any(buffer.granted for buffer in buffers):
        return None
    tensors = [empty(one.form, one.device) for one in came]
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.copy_to(tensor.data_ptr(), tensor.device)
    return tensors


@functools.lru_cache(maxsize=4096)
def _span_without_gaps(shape: torch.Size, strides: tuple[int, ...]) -> int:
    """The elements that a strided tensor reaches if they fill the memory from the first to the last; else 0."""
    span = element_span(shape, strides)
    return span if span == math.prod(size for size, stride in zip(shape, strides, strict=True) if stride) else 0


def _strided_bytes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """The bytes of memory that torch gives a tensor of these strides; 0 for those the general way has to look at."""
    if len(strides) != len(shape) or any(not 0 <= stride <= _MOST_STRIDE for stride in strides):
        return 0
    return element_span(shape, strides) * itemsize


@functools.lru_cache(maxsize=64)
def device_of(name: str) -> torch.device | None:
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
