"""A tensor is a small record and a piece of memory. `describe` splits tensors into both, `rebuild` joins them.

The records say what torch needs to show the memory as the same tensor again. Records come from a peer, so `rebuild`
checks every number in them before it touches the memory; the tensors it returns alias the memory and keep it alive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter

from telegrad.errors import ProtocolError, SerializationError
from telegrad.wire.segments import Segment, cover_storage, element_span, segment_bytes, segment_view
from telegrad.wire.specs import DTYPE_CODES, DTYPES, NO_SEGMENT, PACKED_DTYPES, QUANTIZED_DTYPES, Flag, Kind, TensorSpec

__all__ = ["Segment", "TensorSpec", "describe", "rebuild", "segment_bytes", "segment_view"]


# Those whose memory alone says everything: no conjugate bit, no quantizer.
_SIMPLE_CODES = {d: code for d, code in DTYPE_CODES.items() if not d.is_complex and d not in QUANTIZED_DTYPES}
_COMPRESSED: dict[Any, Kind] = {
    torch.sparse_csr: Kind.SPARSE_CSR,
    torch.sparse_csc: Kind.SPARSE_CSC,
    torch.sparse_bsr: Kind.SPARSE_BSR,
    torch.sparse_bsc: Kind.SPARSE_BSC,
}
_LAYOUTS = {kind: layout for layout, kind in _COMPRESSED.items()}
_WITH_MEMORY = {Kind.DENSE, Kind.QUANTIZED, Kind.QUANTIZED_CHANNELS}
# Parts and scalars each kind needs; None for any number.
_COUNTS: dict[Kind, tuple[int | None, int]] = {
    Kind.DENSE: (0, 0),
    Kind.SPARSE_COO: (2, 0),
    **dict.fromkeys(_LAYOUTS, (3, 0)),
    Kind.QUANTIZED: (0, 2),
    Kind.QUANTIZED_CHANNELS: (2, 1),
    Kind.META: (0, 0),
    Kind.NESTED: (None, 0),
}
_MAX_DIMS = 1024
_MAX_BYTES = 2**63 - 1
_SIMPLE_FLAGS = Flag.REQUIRES_GRAD | Flag.PARAMETER
_PARAMETER = int(Flag.PARAMETER)
_REQUIRES_GRAD = int(Flag.REQUIRES_GRAD)


def describe(tensors: Sequence[Tensor]) -> tuple[list[TensorSpec], list[Segment]]:
    """Split tensors into specs and the memory to send. The first specs are the tensors', in order; parts follow.

    Memory on other devices is copied to the host; host memory is sent from where it lies, so it must not change before
    the transport has taken it.
    """
    specs: list[TensorSpec] = []
    segments: list[Segment] = []
    storages = set()
    try:
        # The common message: contiguous CPU tensors, each with a storage of its own. Anything else leaves the loop.
        for index, tensor in enumerate(tensors):
            cls = type(tensor)
            if (
                (cls is not Tensor and cls is not Parameter)
                or tensor.layout is not torch.strided
                or not tensor.is_cpu
                or tensor.is_nested
                or not tensor.is_contiguous()
                or tensor.is_neg()
            ):
                break
            storages.add(tensor.untyped_storage()._cdata)
            address = tensor.data_ptr()
            code = _SIMPLE_CODES.get(tensor.dtype)
            if not address or code is None or len(storages) <= index:
                break
            flags = _REQUIRES_GRAD if tensor.requires_grad else 0
            if cls is Parameter:
                flags |= _PARAMETER
            specs.append(TensorSpec(0, code, tensor.shape, (), 0, index, flags))
            segments.append(Segment(address, tensor.nbytes, tensor))
        else:
            return specs, segments
    except RuntimeError:
        pass  # torch refused to show this tensor's memory; below it is told apart why
    return _describe_any(tensors)


def _describe_any(tensors: Sequence[Tensor]) -> tuple[list[TensorSpec], list[Segment]]:
    table = list(tensors)  # grows by the parts that its tensors consist of
    specs: list[TensorSpec] = []
    segments: list[Segment] = []
    storages: dict[tuple[str, int], list[int]] = {}
    for index in range(len(table)):
        if table[index].is_cpu and table[index]._is_zerotensor():
            table[index] = table[index].clone()
    index = 0
    while index < len(table):
        tensor = table[index]
        try:
            spec, parts = _take_apart(tensor, len(table))
            if spec.kind in _WITH_MEMORY and tensor.numel():
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
                placed = () if strides == _contiguous_strides(specs[member].shape) else strides
                specs[member] = msgspec.structs.replace(
                    specs[member], strides=placed, offset=offset, segment=len(segments)
                )
            segments.append(segment)
    return specs, segments


def _take_apart(tensor: Tensor, next_index: int) -> tuple[TensorSpec, list[Tensor]]:
    """The spec of one tensor without its place in memory, and the parts it will find from `next_index` on."""
    cls = type(tensor)
    if cls is not Tensor and cls is not Parameter:
        raise _unsendable(tensor, f"its class is {cls.__module__}.{cls.__qualname__}, not torch.Tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _unsendable(tensor, "it exists only inside a torch.func transform: make the call outside of it")
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise _unsendable(tensor, f"its dtype {tensor.dtype} is unknown")
    flags = Flag.PARAMETER if cls is Parameter else Flag(0)
    if tensor.requires_grad:
        flags |= Flag.REQUIRES_GRAD
    data = tensor.detach()
    strides: tuple[int, ...] = ()
    parts: list[Tensor] = []
    scalars: tuple[float, ...] = ()
    if tensor.is_nested:
        kind, parts = Kind.NESTED, [part.contiguous() for part in data.unbind()]
    elif tensor.layout is torch.sparse_coo:
        kind, parts = Kind.SPARSE_COO, [data._indices(), data._values()]
        flags |= Flag.COALESCED if data.is_coalesced() else Flag(0)
    elif tensor.layout in _COMPRESSED:
        kind = _COMPRESSED[tensor.layout]
        by_row = kind in (Kind.SPARSE_CSR, Kind.SPARSE_BSR)
        indices = (data.crow_indices, data.col_indices) if by_row else (data.ccol_indices, data.row_indices)
        parts = [indices[0](), indices[1](), data.values()]
    elif tensor.layout is not torch.strided:
        raise _unsendable(tensor, f"its layout is {tensor.layout}: convert it with to_dense() first")
    else:
        kind = Kind.META if tensor.is_meta else Kind.DENSE
        strides = () if tensor.is_contiguous() else tensor.stride()
        if tensor.is_conj():
            flags |= Flag.CONJ
        if tensor.is_neg():
            flags |= Flag.NEG
        if tensor.is_quantized and kind is Kind.DENSE:
            if tensor.qscheme() == torch.per_tensor_affine:
                kind, scalars = Kind.QUANTIZED, (tensor.q_scale(), tensor.q_zero_point())
            else:
                kind, scalars = Kind.QUANTIZED_CHANNELS, (tensor.q_per_channel_axis(),)
                parts = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    shape = () if kind is Kind.NESTED else tuple(tensor.shape)
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
        dtype, nbytes = _simple_form(spec.dtype, shape)
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
        tensors.append(_finish(tensor, spec.flags) if spec.flags else tensor)
    else:
        return tensors
    return _Rebuilder(specs, buffers, device_for or torch.device).rebuild()


@functools.lru_cache(maxsize=4096)
def _simple_form(code: int, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
    """The dtype and byte count of a dense tensor; 0 bytes where the common case does not hold."""
    dtype = _dtype_of(code)
    nbytes = _checked_size(shape, dtype)
    return dtype, 0 if 0 in shape or dtype in QUANTIZED_DTYPES else nbytes


def _finish(tensor: Tensor, flags: int) -> Tensor:
    requires_grad = bool(flags & _REQUIRES_GRAD)
    if requires_grad and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise ProtocolError(f"a tensor of {tensor.dtype} is said to require gradients, which only floating ones can")
    if flags & _PARAMETER:
        return Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _dtype_of(code: int) -> torch.dtype:
    if not 0 <= code < len(DTYPES):
        raise ProtocolError(f"unknown dtype code {code}; this version knows 0 to {len(DTYPES) - 1}")
    return DTYPES[code]


def _checked_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a contiguous tensor of this shape, counting empty dimensions as one, as torch's strides do."""
    if len(shape) > _MAX_DIMS:
        raise ProtocolError(f"a tensor of {len(shape)} dimensions; at most {_MAX_DIMS} are accepted")
    if any(size < 0 for size in shape):
        raise ProtocolError(f"negative size in tensor shape {shape}")
    nbytes = math.prod(size or 1 for size in shape) * dtype.itemsize
    if nbytes > _MAX_BYTES:
        raise ProtocolError(f"tensor shape {shape} of {dtype} is larger than any memory")
    return nbytes


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class _Rebuilder:
    """The general case of `rebuild`: parts, strides, shared segments, devices."""

    def __init__(
        self, specs: Sequence[TensorSpec], buffers: Sequence[Any], device_for: Callable[[str], torch.device]
    ) -> None:
        self._specs = specs
        self._buffers = buffers
        self._device_for = device_for
        self._storages: dict[tuple[int, str], torch.UntypedStorage] = {}
        self._part_of: dict[int, int] = {}

    def rebuild(self) -> list[Tensor]:
        for index, spec in enumerate(self._specs):
            self._check(index, spec)
        return [self._build(spec) for index, spec in enumerate(self._specs) if index not in self._part_of]

    def _check(self, index: int, spec: TensorSpec) -> None:
        if spec.kind not in _COUNTS:
            raise ProtocolError(f"tensor {index}: unknown kind {spec.kind}")
        kind = Kind(spec.kind)
        parts, scalars = _COUNTS[kind]
        if (parts is not None and len(spec.parts) != parts) or len(spec.scalars) != scalars:
            raise ProtocolError(
                f"tensor {index}: {kind.name} with {len(spec.parts)} parts and {len(spec.scalars)} scalars"
            )
        for part in spec.parts:
            # Parts come after their owner and have none themselves, so there is no cycle.
            if not index < part < len(self._specs) or self._specs[part].kind != Kind.DENSE:
                raise ProtocolError(f"tensor {index}: {part} is not the index of a part")
            if self._part_of.setdefault(part, index) != index or spec.parts.count(part) > 1:
                raise ProtocolError(f"tensor {index}: part {part} already belongs to tensor {self._part_of[part]}")
        if not 0 <= spec.flags < 2 * Flag.COALESCED:
            raise ProtocolError(f"tensor {index}: unknown flags {spec.flags:#x}")
        dtype = _dtype_of(spec.dtype)
        if (dtype in QUANTIZED_DTYPES) != (kind in (Kind.QUANTIZED, Kind.QUANTIZED_CHANNELS)) and kind != Kind.META:
            raise ProtocolError(f"tensor {index}: {kind.name} of {dtype}")
        _checked_size(spec.shape, dtype)
        if spec.strides and len(spec.strides) != len(spec.shape):
            raise ProtocolError(f"tensor {index}: {len(spec.strides)} strides for {len(spec.shape)} dimensions")
        if any(not 0 <= stride <= _MAX_BYTES for stride in spec.strides):
            raise ProtocolError(f"tensor {index}: strides {spec.strides} out of range")
        self._check_memory(index, spec, dtype)

    def _check_memory(self, index: int, spec: TensorSpec, dtype: torch.dtype) -> None:
        span = element_span(spec.shape, spec.strides or _contiguous_strides(spec.shape))
        if span * dtype.itemsize > _MAX_BYTES:
            raise ProtocolError(f"tensor {index}: strides {spec.strides} reach beyond any memory")
        if spec.kind not in _WITH_MEMORY or not span:
            if spec.segment != NO_SEGMENT or spec.offset:
                raise ProtocolError(f"tensor {index} needs no memory but names segment {spec.segment}")
            return
        if not 0 <= spec.segment < len(self._buffers):
            raise ProtocolError(f"tensor {index} lies in segment {spec.segment} of {len(self._buffers)}")
        present = memoryview(self._buffers[spec.segment]).nbytes
        if spec.offset < 0:
            raise ProtocolError(f"tensor {index}: negative offset {spec.offset}")
        needed = (spec.offset + span) * dtype.itemsize
        if dtype in PACKED_DTYPES:
            if spec.strides or spec.offset:
                raise ProtocolError(f"tensor {index}: a view of packed {dtype}")
            needed = -(-span // PACKED_DTYPES[dtype])
        if needed > present:
            raise ProtocolError(f"tensor {index} ends at byte {needed} of segment {spec.segment}, which has {present}")

    def _build(self, spec: TensorSpec) -> Tensor:
        parts = [self._build(self._specs[part]) for part in spec.parts]
        try:
            tensor = self._assemble(spec, Kind(spec.kind), DTYPES[spec.dtype], parts)
        except (RuntimeError, ValueError, TypeError, ArithmeticError, IndexError) as error:
            if isinstance(error, (ProtocolError, SerializationError)):
                raise
            reason = str(error).partition("\n")[0]
            raise ProtocolError(f"torch refuses a received {Kind(spec.kind).name} tensor: {reason}") from error
        return _finish(tensor, spec.flags)

    def _assemble(self, spec: TensorSpec, kind: Kind, dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
        """Put one tensor together. Torch checks what the parts of sparse tensors say about each other."""
        if kind is Kind.NESTED:
            return torch.nested.as_nested_tensor(parts, dtype=dtype, device=self._device(spec.device))
        if kind is Kind.SPARSE_COO:
            indices, values = parts
            coalesced = bool(spec.flags & Flag.COALESCED)
            return torch.sparse_coo_tensor(
                indices, values, spec.shape, dtype=dtype, is_coalesced=coalesced, check_invariants=True
            )
        if kind in _LAYOUTS:
            compressed, plain, values = parts
            return torch.sparse_compressed_tensor(
                compressed, plain, values, spec.shape, dtype=dtype, layout=_LAYOUTS[kind], check_invariants=True
            )
        strides = spec.strides or _contiguous_strides(spec.shape)
        if kind is Kind.META:
            tensor = torch.empty_strided(spec.shape, strides, dtype=dtype, device="meta")
        else:
            tensor = self._with_memory(spec, self._empty(spec, kind, dtype, parts), strides)
        if spec.flags & Flag.CONJ:
            tensor = torch._conj(tensor).detach()
        if spec.flags & Flag.NEG:
            tensor = torch._neg_view(tensor).detach()
        return tensor

    def _empty(self, spec: TensorSpec, kind: Kind, dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
        """A tensor of the right kind, whose memory is put in its place afterwards."""
        device = self._device(spec.device)
        if kind is Kind.DENSE:
            return torch.empty(0, dtype=dtype, device=device)
        if kind is Kind.QUANTIZED:
            scale, zero_point = spec.scalars
            return torch._empty_affine_quantized(
                spec.shape, scale=scale, zero_point=int(zero_point), dtype=dtype, device=device
            )
        axis = int(spec.scalars[0])
        if not 0 <= axis < len(spec.shape) or any(part.shape != (spec.shape[axis],) for part in parts):
            raise ProtocolError(f"quantized tensor of shape {spec.shape}: scales and axis {axis} do not fit it")
        scales, zero_points = parts
        return torch._empty_per_channel_affine_quantized(
            spec.shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=device
        )

    def _with_memory(self, spec: TensorSpec, empty: Tensor, strides: tuple[int, ...]) -> Tensor:
        if spec.segment == NO_SEGMENT:
            return empty.as_strided_(spec.shape, strides)
        storage = self._storage(spec.segment, spec.device)
        if empty.dtype in PACKED_DTYPES:  # torch measures these storages in whole elements, so it cannot alias them
            empty.untyped_storage().copy_(storage)
            return empty
        return empty.set_(storage, spec.offset, spec.shape, strides)

    def _storage(self, segment: int, device: str) -> torch.UntypedStorage:
        """One storage for all tensors of a segment, so that they share memory as they did at the sender."""
        storage = self._storages.get((segment, device))
        if storage is None:
            base = torch.frombuffer(self._buffers[segment], dtype=torch.uint8)
            storage = base.to(self._device(device)).untyped_storage()
            self._storages[segment, device] = storage
        return storage

    def _device(self, name: str) -> torch.device:
        if not name:
            return torch.device("cpu")
        try:
            device = self._device_for(name)
        except RuntimeError as error:
            raise ProtocolError(f"{name!r} is not a device") from error
        if device.type == "meta":
            raise ProtocolError("a tensor with memory cannot live on the meta device")
        return device
