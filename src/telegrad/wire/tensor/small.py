"""The commonest message: a few small, plain tensors. Their bytes follow one another in the frame, each at a multiple of
16, and nothing else says where they are: a spec tells how many bytes are its own.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from ctypes import PYFUNCTYPE, c_ssize_t, c_void_p, py_object, pythonapi
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, from_numpy, frombuffer
from torch.autograd import forward_ad
from torch.nn import Parameter

from telegrad.errors import ProtocolError
from telegrad.wire.tensor.assembly import check_flags, checked_size, dtype_of, finish
from telegrad.wire.tensor.specs import DTYPE_CODES, NO_SEGMENT, QUANTIZED_DTYPES, Flag, TensorSpec

MOST_BYTES = 16 * 1024  # of all tensors of one message

_ALIGNMENT = 16
# Those whose memory alone says everything: no conjugate bit, no quantizer.
PLAIN_CODES = {d: code for d, code in DTYPE_CODES.items() if not d.is_complex and d not in QUANTIZED_DTYPES}
_bytes_at = PYFUNCTYPE(py_object, c_void_p, c_ssize_t)(("PyBytes_FromStringAndSize", pythonapi))
_MOST_DIMS_OF_NUMPY = 32
# Plain ints: arithmetic on enums costs a microsecond.
_REQUIRES_GRAD = int(Flag.REQUIRES_GRAD)
_PARAMETER = int(Flag.PARAMETER)
_Form = tuple[torch.Size, tuple[int, ...]]
_Kind = tuple[torch.dtype, torch.Size, bool, torch.layout, bool]
_kind: Callable[[Tensor], _Kind] = attrgetter("dtype", "shape", "requires_grad", "layout", "is_cpu")


def describe_small(tensors: Sequence[Tensor]) -> tuple[Sequence[TensorSpec], bytes] | None:
    """Specs and a copy of all bytes, if these are few, contiguous, on the CPU, and no two tensors share memory."""
    if forward_ad._current_level >= 0:
        return None  # any of them may have a tangent
    try:
        if len(tensors) != 1:
            return _describe_several(tensors)
        (tensor,) = tensors
        # The shape of a nested tensor cannot be asked for, so such a one ends here.
        form = _small_form(type(tensor), _kind(tensor))
        if form is None or not tensor.is_contiguous() or tensor.is_neg() or not (address := tensor.data_ptr()):
            return None
        return form.specs, _bytes_at(address, form.nbytes)
    except RuntimeError:
        return None  # torch refused to show this tensor's memory; the general way tells why


def _describe_several(tensors: Sequence[Tensor]) -> tuple[Sequence[TensorSpec], bytes] | None:
    specs: list[TensorSpec] = []
    data = b""
    for tensor in tensors:
        form = _small_form(type(tensor), _kind(tensor))
        if form is None or not tensor.is_contiguous() or tensor.is_neg() or not (address := tensor.data_ptr()):
            return None
        specs += form.specs
        data += _bytes_at(address, form.nbytes) + form.padding
        if len(data) > MOST_BYTES:
            return None
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(specs):
        return None
    return specs, data


class _SmallForm(NamedTuple):
    """What there is to say about tensors of one kind, if they are contiguous."""

    specs: tuple[TensorSpec, ...]  # one
    nbytes: int
    padding: bytes  # between it and the next


@functools.lru_cache(maxsize=4096)
def _small_form(cls: type, kind: _Kind) -> _SmallForm | None:
    """None if it is not plain."""
    dtype, shape, requires_grad, layout, is_cpu = kind
    code = PLAIN_CODES.get(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if code is None or (cls is not Tensor and cls is not Parameter) or layout is not torch.strided or not is_cpu:
        return None
    if not 0 < nbytes <= MOST_BYTES:
        return None
    flags = _REQUIRES_GRAD * requires_grad | _PARAMETER * (cls is Parameter)
    spec = TensorSpec(0, code, tuple(shape), (), 0, NO_SEGMENT, flags)
    return _SmallForm((spec,), nbytes, bytes(-nbytes % _ALIGNMENT))


def rebuild_small(specs: Sequence[TensorSpec], data: Any, offset: int) -> list[Tensor]:
    """The tensors whose bytes begin at `offset` of a writable buffer; they alias it and keep it alive.

    Raises ProtocolError for specs that are not plain or do not fit the memory.
    """
    tensors: list[Tensor] = []
    for spec in specs:
        array, dtype, count, taken, form, flags = _plain_form(spec)
        try:
            if array is not None:
                tensor = from_numpy(array(data, offset))
            else:
                tensor = frombuffer(data, dtype=dtype, count=count, offset=offset)
                if form is not None:
                    tensor.as_strided_(*form)  # as many elements: of what torch offers, the least work
        except (TypeError, ValueError) as error:
            nbytes = count * dtype.itemsize
            raise ProtocolError(f"a tensor of {nbytes} bytes begins at byte {offset} of {len(data)}") from error
        if flags:
            tensor = tensor.requires_grad_() if flags == _REQUIRES_GRAD else finish(tensor, flags)
        tensors.append(tensor)
        offset += taken
    return tensors


class _PlainForm(NamedTuple):
    """What is to be known to put together a tensor that `describe_small` could have described."""

    array: Callable[[Any, int], Any] | None  # makes an array of some memory, from some byte on: see `_array_of`
    dtype: torch.dtype
    elements: int
    taken: int  # bytes up to the next tensor
    strided: _Form | None  # unless there is one dimension
    flags: int


@functools.lru_cache(maxsize=4096)
def _plain_form(spec: TensorSpec) -> _PlainForm:
    """That of a spec, which is checked."""
    dtype = dtype_of(spec.dtype)
    nbytes = checked_size(spec.shape, dtype)
    general = TensorSpec(0, spec.dtype, spec.shape, (), 0, NO_SEGMENT, spec.flags)
    if spec != general or dtype not in PLAIN_CODES or 0 in spec.shape:
        raise ProtocolError(f"the bytes of a tensor came in the plainest form, which cannot hold it: {spec}")
    if not 0 <= spec.flags <= _REQUIRES_GRAD | _PARAMETER:
        raise ProtocolError(f"unknown flags {spec.flags:#x} of a tensor")
    check_flags(dtype, spec.flags)
    strides = tuple([math.prod(spec.shape[position + 1 :]) for position in range(len(spec.shape))])
    strided = (torch.Size(spec.shape), strides) if len(strides) != 1 else None
    array = _array_of(spec.shape, dtype) if strided is not None else None
    return _PlainForm(array, dtype, nbytes // dtype.itemsize, nbytes + -nbytes % _ALIGNMENT, strided, spec.flags)


def _array_of(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[Any, int], Any] | None:
    """Where torch has loaded numpy, memory gets its shape by that, which takes half as long as to have torch change it;
    None for what numpy does not have."""
    numpy = sys.modules.get("numpy")
    if numpy is None or len(shape) > _MOST_DIMS_OF_NUMPY:
        return None
    try:
        like = torch.zeros(
            1, dtype=dtype, device="cpu"
        ).numpy()  # not for all dtypes, nor with a numpy that this torch cannot use
    except (RuntimeError, TypeError):
        return None
    return functools.partial(numpy.ndarray, shape, like.dtype)
