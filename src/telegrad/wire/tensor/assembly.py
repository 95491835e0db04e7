"""Puts received tensors together in the general case: parts, strides, shared segments, devices.

First every spec is checked, alone and against the memory and the other specs; only then is memory touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from telegrad.cuda import order
from telegrad.cuda.host import to_device
from telegrad.errors import ProtocolError, SerializationError
from telegrad.wire.tensor.segments import contiguous_strides, element_span, overlapping
from telegrad.wire.tensor.specs import (
    COMPRESSED_KINDS,
    DTYPES,
    KINDS_WITH_MEMORY,
    NO_SEGMENT,
    PACKED_DTYPES,
    QUANTIZED_DTYPES,
    Flag,
    TensorKind,
    TensorSpec,
)

_LAYOUTS = {kind: layout for layout, kind in COMPRESSED_KINDS.items()}
# Parts and scalars each kind needs; None for any number.
_COUNTS: dict[TensorKind, tuple[int | None, int]] = {
    TensorKind.DENSE: (0, 0),
    TensorKind.SPARSE_COO: (2, 0),
    **dict.fromkeys(_LAYOUTS, (3, 0)),
    TensorKind.QUANTIZED: (0, 2),
    TensorKind.QUANTIZED_CHANNELS: (2, 1),
    TensorKind.META: (0, 0),
    TensorKind.NESTED: (None, 0),
}
# Plain ints: arithmetic on enums costs a microsecond.
_REQUIRES_GRAD = int(Flag.REQUIRES_GRAD)
_PARAMETER = int(Flag.PARAMETER)
_MAX_DIMS = 1024
_MAX_BYTES = 2**63 - 1


def dtype_of(code: int) -> torch.dtype:
    if not 0 <= code < len(DTYPES):
        raise ProtocolError(f"unknown dtype code {code}; this version knows 0 to {len(DTYPES) - 1}")
    return DTYPES[code]


def checked_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a contiguous tensor of this shape, counting empty dimensions as one, as torch's strides do."""
    if len(shape) > _MAX_DIMS:
        raise ProtocolError(f"a tensor of {len(shape)} dimensions; at most {_MAX_DIMS} are accepted")
    if any(size < 0 for size in shape):
        raise ProtocolError(f"negative size in tensor shape {shape}")
    nbytes = math.prod(size or 1 for size in shape) * dtype.itemsize
    if nbytes > _MAX_BYTES:
        raise ProtocolError(f"tensor shape {shape} of {dtype} is larger than any memory")
    return nbytes


def check_flags(dtype: torch.dtype, flags: int) -> None:
    if flags & _REQUIRES_GRAD and not (dtype.is_floating_point or dtype.is_complex):
        raise ProtocolError(f"a tensor of {dtype} is said to require gradients, which only floating ones can")


def _check_written_out(index: int, spec: TensorSpec) -> None:
    """What is copied as it is put together has to have come whole: a few bytes can say that they repeat without end."""
    if element_span(spec.shape, spec.strides or contiguous_strides(spec.shape)) < math.prod(spec.shape):
        raise ProtocolError(f"tensor {index}, of a nested one, repeats the memory it came with")


def finish(tensor: Tensor, flags: int) -> Tensor:
    requires_grad = bool(flags & _REQUIRES_GRAD)
    check_flags(tensor.dtype, flags)
    if flags & _PARAMETER:
        return Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


class Assembly:
    """One table of received tensors."""

    def __init__(
        self, specs: Sequence[TensorSpec], buffers: Sequence[Any], device_for: Callable[[str], torch.device]
    ) -> None:
        self._specs = specs
        self._buffers = buffers
        self._device_for = device_for
        self._storages: dict[tuple[int, str], torch.UntypedStorage] = {}
        self._devices: dict[str, torch.device] = {}
        self._part_of: dict[int, int] = {}

    def rebuild(self) -> list[Tensor]:
        for index, spec in enumerate(self._specs):
            self._check(index, spec)
        tensors = [self._build(spec) for index, spec in enumerate(self._specs) if index not in self._part_of]
        self._tie_aliases(tensors)
        return [finish(tensor, spec.flags) for tensor, spec in zip(tensors, self._specs, strict=False)]

    def _tie_aliases(self, tensors: list[Tensor]) -> None:
        """Tensors that overlap become views of one base, as they were where they came from. So they have one version
        counter, and torch notices when one is changed in place and another is then used."""
        sharing: dict[tuple[int, str], list[int]] = {}
        for index, spec in enumerate(self._specs[: len(tensors)]):  # parts come after all tensors
            if spec.kind == TensorKind.DENSE and spec.segment != NO_SEGMENT:
                sharing.setdefault((spec.segment, spec.device), []).append(index)
        for members in sharing.values():
            if len(members) > 1:
                base = torch.empty(0, dtype=torch.uint8, device=tensors[members[0]].device)
                base.set_(tensors[members[0]].untyped_storage())
                for position in overlapping([tensors[index] for index in members]):
                    index = members[position]
                    tensors[index] = self._as_view(base, self._specs[index], tensors[index])

    def _as_view(self, base: Tensor, spec: TensorSpec, tensor: Tensor) -> Tensor:
        whole = base[: base.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if spec.flags & Flag.CONJ:
            view = torch._conj(view)
        return torch._neg_view(view) if spec.flags & Flag.NEG else view

    def _check(self, index: int, spec: TensorSpec) -> None:
        if spec.kind not in _COUNTS:
            raise ProtocolError(f"tensor {index}: unknown kind {spec.kind}")
        kind = TensorKind(spec.kind)
        parts, scalars = _COUNTS[kind]
        if (parts is not None and len(spec.parts) != parts) or len(spec.scalars) != scalars:
            raise ProtocolError(
                f"tensor {index}: {kind.name} with {len(spec.parts)} parts and {len(spec.scalars)} scalars"
            )
        for part in spec.parts:
            # Parts come after their owner and have none themselves, so there is no cycle.
            if not index < part < len(self._specs) or self._specs[part].kind != TensorKind.DENSE:
                raise ProtocolError(f"tensor {index}: {part} is not the index of a part")
            if self._part_of.setdefault(part, index) != index or spec.parts.count(part) > 1:
                raise ProtocolError(f"tensor {index}: part {part} already belongs to tensor {self._part_of[part]}")
            if kind is TensorKind.NESTED:
                _check_written_out(part, self._specs[part])
        if not 0 <= spec.flags < 2 * Flag.COALESCED:
            raise ProtocolError(f"tensor {index}: unknown flags {spec.flags:#x}")
        dtype = dtype_of(spec.dtype)
        if (dtype in QUANTIZED_DTYPES) != (
            kind in (TensorKind.QUANTIZED, TensorKind.QUANTIZED_CHANNELS)
        ) and kind != TensorKind.META:
            raise ProtocolError(f"tensor {index}: {kind.name} of {dtype}")
        checked_size(spec.shape, dtype)
        if spec.strides and len(spec.strides) != len(spec.shape):
            raise ProtocolError(f"tensor {index}: {len(spec.strides)} strides for {len(spec.shape)} dimensions")
        if any(not 0 <= stride <= _MAX_BYTES for stride in spec.strides):
            raise ProtocolError(f"tensor {index}: strides {spec.strides} out of range")
        self._check_memory(index, spec, dtype)

    def _check_memory(self, index: int, spec: TensorSpec, dtype: torch.dtype) -> None:
        span = element_span(spec.shape, spec.strides or contiguous_strides(spec.shape))
        if span * dtype.itemsize > _MAX_BYTES:
            raise ProtocolError(f"tensor {index}: strides {spec.strides} reach beyond any memory")
        if spec.kind not in KINDS_WITH_MEMORY or not span:
            if spec.segment != NO_SEGMENT or spec.offset:
                raise ProtocolError(f"tensor {index} needs no memory but names segment {spec.segment}")
            return
        if not 0 <= spec.segment < len(self._buffers):
            raise ProtocolError(f"tensor {index} lies in segment {spec.segment} of {len(self._buffers)}")
        buffer = self._buffers[spec.segment]
        present = buffer.nbytes if hasattr(buffer, "nbytes") else memoryview(buffer).nbytes
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
            tensor = self._assemble(spec, TensorKind(spec.kind), DTYPES[spec.dtype], parts)
        except (RuntimeError, ValueError, TypeError, ArithmeticError, IndexError) as error:
            if isinstance(error, (ProtocolError, SerializationError)):
                raise
            reason = str(error).partition("\n")[0]
            raise ProtocolError(f"torch refuses a received {TensorKind(spec.kind).name} tensor: {reason}") from error
        return tensor

    def _assemble(self, spec: TensorSpec, kind: TensorKind, dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
        """Put one tensor together. Torch checks what the parts of sparse tensors say about each other."""
        if kind is TensorKind.NESTED:
            return torch.nested.as_nested_tensor(parts, dtype=dtype, device=self._device(spec.device))
        # Indices are copied: whoever sent them may have put another tensor into the same memory, and torch, which
        # checks them here, believes them from then on. Written through that one they would lead out of the tensor.
        if kind is TensorKind.SPARSE_COO:
            indices, values = parts[0].clone(), parts[1]
            coalesced = bool(spec.flags & Flag.COALESCED)
            return torch.sparse_coo_tensor(
                indices, values, spec.shape, dtype=dtype, is_coalesced=coalesced, check_invariants=True
            )
        if kind in _LAYOUTS:
            compressed, plain, values = parts[0].clone(), parts[1].clone(), parts[2]
            return torch.sparse_compressed_tensor(
                compressed, plain, values, spec.shape, dtype=dtype, layout=_LAYOUTS[kind], check_invariants=True
            )
        strides = spec.strides or contiguous_strides(spec.shape)
        if kind is TensorKind.META:
            tensor = torch.empty_strided(spec.shape, strides, dtype=dtype, device="meta")
        else:
            tensor = self._with_memory(spec, self._empty(spec, kind, dtype, parts), strides)
        if spec.flags & Flag.CONJ:
            tensor = torch._conj(tensor).detach()
        if spec.flags & Flag.NEG:
            tensor = torch._neg_view(tensor).detach()
        return tensor

    def _empty(self, spec: TensorSpec, kind: TensorKind, dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
        """A tensor of the right kind, whose memory is put in its place afterwards."""
        device = self._device(spec.device)
        if kind is TensorKind.DENSE:
            return torch.empty(0, dtype=dtype, device=device)
        if kind is TensorKind.QUANTIZED:
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
            buffer, target = self._buffers[segment], self._device(device)
            if hasattr(buffer, "storage_on"):  # it came in device memory
                storage = buffer.storage_on(target)
            elif target.type == "cuda":
                storage = to_device(buffer, target)
            else:
                storage = torch.frombuffer(buffer, dtype=torch.uint8).to(target).untyped_storage()
            self._storages[segment, device] = storage
        return storage

    def _device(self, name: str) -> torch.device:
        if not name:
            return torch.device("cpu")
        if name not in self._devices:
            try:
                device = self._device_for(name)
            except RuntimeError as error:
                raise ProtocolError(f"{name!r} is not a device") from error
            if device.type == "meta":
                raise ProtocolError("a tensor with memory cannot live on the meta device")
            try:
                torch.empty(0, device=device)
            except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
                raise SerializationError(
                    f"a tensor of the sender's {name} goes to {device}, which the receiving worker does not have; "
                    "map the device to another, or send the tensor from the CPU"
                ) from error
            if device.type == "cuda":
                order.use(device.index or 0)
            self._devices[name] = device
        return self._devices[name]
