"""A tensor is a small record and a piece of memory. `describe` splits tensors into both, `rebuild` joins them.

The records say what torch needs to show the memory as the same tensor again. Records come from a peer, so `rebuild`
checks every number in them before it touches the memory; the tensors it returns alias the memory and keep it alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from telegrad.errors import SerializationError
from telegrad.wire.tensor.assembly import Assembly, finish
from telegrad.wire.tensor.on_device import describe_on_device, rebuild_on_device, simple_form
from telegrad.wire.tensor.segments import Segment, contiguous_strides, cover_storage, segment_bytes, segment_view
from telegrad.wire.tensor.small import PLAIN_CODES, describe_small
from telegrad.wire.tensor.specs import (
    COMPRESSED_KINDS,
    DTYPE_CODES,
    KINDS_WITH_MEMORY,
    NO_SEGMENT,
    Flag,
    TensorKind,
    TensorSpec,
)

__all__ = ["Segment", "TensorSpec", "describe", "disassemble", "rebuild", "segment_bytes", "segment_view"]

# Plain ints: arithmetic on enums costs a microsecond.
_SIMPLE_FLAGS = int(Flag.REQUIRES_GRAD | Flag.PARAMETER)
_PARAMETER = int(Flag.PARAMETER)
_REQUIRES_GRAD = int(Flag.REQUIRES_GRAD)


def disassemble(tensors: Sequence[Tensor]) -> tuple[Sequence[TensorSpec], list[Segment] | bytes]:
    """Split tensors into specs and the memory to send: the bytes of a few small ones, or segments."""
    return describe_small(tensors) or describe(tensors)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its elements one after another in host memory, and nothing else but a dtype and a shape."""
    cls = type(tensor)
    return (
        (cls is Tensor or cls is Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def describe(tensors: Sequence[Tensor]) -> tuple[list[TensorSpec], list[Segment]]:
    """Split tensors into specs and the memory to send. The first specs are the tensors', in order; parts follow.

    Memory is sent from where it lies, on the host or on a CUDA device, so it must not change before the transport has
    taken it. Memory on devices of other kinds is copied to the host.
    """
    if forward_ad._current_level >= 0:
        return _describe_any(tensors)  # which looks for tangents
    specs: list[TensorSpec] = []
    segments: list[Segment] = []
    storages = set()
    try:
        # The common message: contiguous CPU tensors, each with a storage of its own. Anything else leaves the loop.
        for index, tensor in enumerate(tensors):
            if not _is_plain(tensor):
                break
            storages.add(tensor.untyped_storage()._cdata)
            address = tensor.data_ptr()
            code = PLAIN_CODES.get(tensor.dtype)
            if not address or code is None or len(storages) <= index:
                break
            flags = _REQUIRES_GRAD if tensor.requires_grad else 0
            if type(tensor) is Parameter:
                flags |= _PARAMETER
            specs.append(TensorSpec(0, code, tensor.shape, (), 0, index, flags))
            segments.append(Segment(address, tensor.nbytes, tensor))
        else:
            return specs, segments
    except RuntimeError:
        pass  # torch refused to show this tensor's memory; below it is told apart why
    return (describe_on_device(tensors) if tensors[0].is_cuda else None) or _describe_any(tensors)


def _describe_any(tensors: Sequence[Tensor]) -> tuple[list[TensorSpec], list[Segment]]:
    table = list(tensors)  # grows by the parts that its tensors consist of
    specs: list[TensorSpec] = []
    segments: list[Segment] = []
    storages: dict[tuple[str, int], list[int]] = {}
    index = 0
    while index < len(table):
        tensor = table[index]
        try:
            _refuse_strangers(tensor)
            if tensor._is_zerotensor():  # forward-mode AD keeps zeros without memory
                tensor = table[index] = tensor.clone()
            spec, parts = _take_apart(tensor, len(table))
            if spec.kind in KINDS_WITH_MEMORY and tensor.numel():
                storages.setdefault((spec.device, tensor.untyped_storage()._cdata), []).append(index)
                if not tensor.untyped_storage().data_ptr():
                    raise _unsendable(tensor, "its memory is not allocated")
        except RuntimeError as error:
            if isinstance(error, SerializationError):
                raise
            raise _unsendable(tensor, str(error).partition("\n")[0]) from error
        table += parts
        specs.append(spec)
        index += 1
    for members in storages.values():
        for segment, placements in cover_storage([table[member] for member in members]):
            for position, offset, strides in placements:
                member = members[position]
                placed = () if strides == contiguous_strides(specs[member].shape) else strides
                specs[member] = msgspec.structs.replace(
                    specs[member], strides=placed, offset=offset, segment=len(segments)
                )
            segments.append(segment)
    return specs, segments


def _refuse_strangers(tensor: Tensor) -> None:
    cls = type(tensor)
    if cls is not Tensor and cls is not Parameter:
        raise _unsendable(tensor, f"its class is {cls.__module__}.{cls.__qualname__}, not torch.Tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _unsendable(tensor, "it exists only inside a torch.func transform: make the call outside of it")
    if forward_ad._current_level >= 0 and _has_tangent(tensor):
        raise _unsendable(
            tensor, "it has a tangent of forward-mode AD, which would be lost: make the call outside of it"
        )


def _has_tangent(tensor: Tensor) -> bool:
    """For while a level of forward-mode AD is open, which may be another thread's."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False  # torch has none for these, and cannot be asked
    # No type is declared for this one of torch's.
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _take_apart(tensor: Tensor, next_index: int) -> tuple[TensorSpec, list[Tensor]]:
    """The spec of one tensor without its place in memory, and the parts it will find from `next_index` on."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise _unsendable(tensor, f"its dtype {tensor.dtype} is unknown")
    flags = Flag.PARAMETER if type(tensor) is Parameter else Flag(0)
    if tensor.requires_grad:
        flags |= Flag.REQUIRES_GRAD
    data = tensor.detach()
    strides: tuple[int, ...] = ()
    parts: list[Tensor] = []
    scalars: tuple[float, ...] = ()
    if tensor.is_nested:
        kind, parts = TensorKind.NESTED, [part.contiguous() for part in data.unbind()]
    elif tensor.layout is torch.sparse_coo:
        kind, parts = TensorKind.SPARSE_COO, [data._indices(), data._values()]
        flags |= Flag.COALESCED if data.is_coalesced() else Flag(0)
    elif tensor.layout in COMPRESSED_KINDS:
        kind = COMPRESSED_KINDS[tensor.layout]
        by_row = kind in (TensorKind.SPARSE_CSR, TensorKind.SPARSE_BSR)
        indices = (data.crow_indices, data.col_indices) if by_row else (data.ccol_indices, data.row_indices)
        parts = [indices[0](), indices[1](), data.values()]
    elif tensor.layout is not torch.strided:
        raise _unsendable(tensor, f"its layout is {tensor.layout}: convert it with to_dense() first")
    else:
        kind = TensorKind.META if tensor.is_meta else TensorKind.DENSE
        strides = () if tensor.stride() == contiguous_strides(tensor.shape) else tensor.stride()
        if tensor.is_conj():
            flags |= Flag.CONJ
        if tensor.is_neg():
            flags |= Flag.NEG
        if tensor.is_quantized and kind is TensorKind.DENSE:
            if tensor.qscheme() == torch.per_tensor_affine:
                kind, scalars = TensorKind.QUANTIZED, (tensor.q_scale(), tensor.q_zero_point())
            else:
                kind, scalars = TensorKind.QUANTIZED_CHANNELS, (tensor.q_per_channel_axis(),)
                parts = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    shape = () if kind is TensorKind.NESTED else tuple(tensor.shape)
    device = "" if tensor.is_cpu or tensor.is_meta else str(tensor.device)
    places = tuple(range(next_index, next_index + len(parts)))
    return TensorSpec(int(kind), code, shape, strides, 0, NO_SEGMENT, int(flags), device, places, scalars), parts


def _unsendable(tensor: Tensor, why: str) -> SerializationError:
    cls = type(tensor)
    try:
        form = f" of shape {tuple(tensor.shape)}, {tensor.dtype}"
    except RuntimeError:  # lazily initialised and nested tensors have no shape to tell
        form = ""
    return SerializationError(f"a {cls.__qualname__}{form} cannot be sent: {why}")


def rebuild(
    specs: Sequence[TensorSpec],
    buffers: Sequence[Any],
    device_for: Callable[[str], torch.device] | None = None,
) -> list[Tensor]:
    """Join specs and memory. `buffers[i]` is a writable buffer with segment i; the tensors alias it and keep it alive.

    `device_for` says where tensors of a sender's device go; without it, to the device of the same name.
    Raises ProtocolError for specs that do not fit each other, the memory, or torch.
    """
    if device_for is None and specs and specs[0].device:
        found = rebuild_on_device(specs, buffers)
        if found is not None:
            return found
    tensors: list[Tensor] = []
    count = len(buffers)
    # The mirror of the common case in `describe`: spec i alone uses segment i, wholly.
    for index, spec in enumerate(specs):
        if (
            spec.segment != index
            or index >= count
            or spec.kind
            or spec.strides
            or spec.offset
            or spec.device
            or spec.parts
            or spec.scalars
            or not 0 <= spec.flags <= _SIMPLE_FLAGS
        ):
            break
        shape = spec.shape
        dtype, nbytes = simple_form(spec.dtype, shape)
        if not nbytes:
            break
        try:
            tensor = torch.frombuffer(buffers[index], dtype=dtype)
        except ValueError:  # not a whole number of elements
            break
        if tensor.nbytes != nbytes:
            break
        if len(shape) != 1:
            tensor.resize_(shape) if not shape else tensor.resize_(*shape)  # same size: only the shape changes
        tensors.append(finish(tensor, spec.flags) if spec.flags else tensor)
    else:
        return tensors
    return Assembly(specs, buffers, device_for or torch.device).rebuild()
