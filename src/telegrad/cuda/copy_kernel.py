"""One launch for a message: a kernel that copies all its tensors and then writes the number that says so.

As a call of CUDA each copy costs the thread 7 us and more, longer than the GPU takes for a small one: an echo of 100
small tensors takes 8.7 ms by calls and 5.4 ms by launches. Where the kernel cannot be had (a GPU older than the code, a
driver that refuses it), or would be slower (large pieces, for which CUDA's own copy is faster, above all if they
do not begin at whole words), the calls are made.

`copy_kernel.cu` is the kernel. What is shipped is its PTX, which the driver compiles for the GPU it finds: neither a
compiler nor a GPU is needed to build this package.
"""

from __future__ import annotations

import functools
import logging
import struct
import threading
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from telegrad.cuda.runtime import CudaError, KernelArgument, runtime

log = logging.getLogger("telegrad.cuda")

MOST_PIECES = 32  # in one launch, as in the kernel
THREADS = 256
_BYTES_OF_BLOCK = THREADS * 64  # four words of 16 bytes for each thread
_BLOCKS_OF_PROCESSOR = 4  # that many keep the memory busy
_SLOW_FROM = 64 * 1024  # bytes of a piece that would be copied byte by byte
_LARGE = 16 * 2**20  # bytes of a piece from which CUDA's own copy is some 6% faster
_COUNTERS = 4096  # in one allocation

_HEAD = struct.Struct("=QQII")
_PIECE = struct.Struct("=QQQ")
_loading = threading.Lock()


@functools.cache
def _arguments(count: int) -> struct.Struct:
    """What the kernel takes for so many pieces."""
    return struct.Struct(_HEAD.format + _PIECE.format[1:] * count)


_ONE = _arguments(1)

Piece = tuple[int, int, int]  # memory to be copied: from where, to where, how many bytes, as the GPU sees it


def copy_and_tell(device: int, stream: int, pieces: Sequence[Piece], number: int, value: int, counter: int) -> None:
    """Enqueue copies of all pieces on a stream of `device`, and then that `value` is written at `number`.

    `counter` is of `take_counter`, and of no other launch that may run at the same time; 0 if there was none."""
    kernel = _kernels.get(device) if counter else None
    for source, target, nbytes in pieces:
        if nbytes > _SLOW_FROM and (nbytes > _LARGE or (source | target) % 16):
            kernel = None
            break
    if kernel is None:
        cuda = runtime()
        for source, target, nbytes in pieces:
            cuda.copy(target, source, nbytes, stream)
        cuda.write_value(stream, number, value)
        return
    while len(pieces) > MOST_PIECES:
        kernel.launch(stream, pieces[:MOST_PIECES], 0, 0, counter)
        pieces = pieces[MOST_PIECES:]
    kernel.launch(stream, pieces, number, value, counter)


def copy_one_and_tell(
    device: int, stream: int, source: int, target: int, nbytes: int, number: int, value: int, counter: int
) -> None:
    """The same for one piece: most messages have one tensor."""
    kernel = _kernels.get(device) if counter else None
    if kernel is None or (nbytes > _SLOW_FROM and (nbytes > _LARGE or (source | target) % 16)):
        copy_and_tell(device, stream, ((source, target, nbytes),), number, value, 0)
    else:
        kernel.launch_one(stream, (number, counter, value & 0xFFFFFFFF, 1, source, target, nbytes), nbytes)


class _Kernel:
    """The kernel as it was loaded for one GPU."""

    def __init__(self, device: int) -> None:
        self._device = device
        code = files("telegrad.cuda").joinpath("copy_kernel.ptx").read_bytes()
        with torch.cuda.device(device):
            self._function = runtime().load_kernel(code, b"copy_and_tell")
        self._runtime = runtime()
        self._most_blocks = torch.cuda.get_device_properties(device).multi_processor_count * _BLOCKS_OF_PROCESSOR
        self._local = _Local()

    def launch(self, stream: int, pieces: Sequence[Piece], number: int, value: int, counter: int) -> None:
        """Enqueue copies of at most `MOST_PIECES`, and the number unless that is 0."""
        argument = self._local.argument  # of this thread: it is read while others run
        total = 0
        numbers: list[int] = []
        for piece in pieces:
            numbers += piece
            total += piece[2]
        count = len(pieces)
        _arguments(count).pack_into(argument.memory, 0, number, counter, value & 0xFFFFFFFF, count, *numbers)
        self._begin(stream, argument.parameters, total)

    def launch_one(self, stream: int, work: tuple[int, ...], nbytes: int) -> None:
        """The same for one piece of so many bytes; `work` is all of what the kernel takes."""
        argument = self._local.argument
        _ONE.pack_into(argument.memory, 0, *work)
        self._begin(stream, argument.parameters, nbytes)

    def _begin(self, stream: int, parameters: Any, total: int) -> None:
        blocks = min(-(-total // _BYTES_OF_BLOCK) or 1, self._most_blocks)
        if torch._C._cuda_getDevice() == self._device:
            self._runtime.launch(self._function, blocks, THREADS, stream, parameters)
        else:
            with torch.cuda.device(self._device):
                self._runtime.launch(self._function, blocks, THREADS, stream, parameters)


class _Local(threading.local):
    def __init__(self) -> None:
        self.argument = KernelArgument(_HEAD.size + MOST_PIECES * _PIECE.size)


_kernels: dict[int, _Kernel | None] = {}


def _kernel(device: int) -> _Kernel | None:
    """The kernel for a GPU, loaded when it is first needed; None if it cannot be had."""
    if device not in _kernels:
        with _loading:
            if device not in _kernels:
                try:
                    _kernels[device] = _Kernel(device)
                except (CudaError, OSError) as error:
                    log.info(
                        "the copying kernel cannot be used on cuda:%d, copies are separate calls: %s", device, error
                    )
                    _kernels[device] = None
    return _kernels[device]


# --- counters ---


class _Counters:
    """Words of device memory that are 0, one for each block that messages travel in."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._free: list[int] = []
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            if not self._free:
                with torch.cuda.device(self._device):
                    first = runtime().allocate(4 * _COUNTERS)
                    runtime().fill(first, 0, 4 * _COUNTERS)
                self._free = [first + 4 * place for place in range(_COUNTERS)]
            return self._free.pop()

    def give_back(self, counter: int) -> None:
        self._free.append(counter)


@functools.cache
def _counters(device: int) -> _Counters:
    return _Counters(device)


def take_counter(device: int) -> int:
    """A word of device memory for the launches of one block; 0 where the kernel cannot be had."""
    try:
        return _counters(device).take() if _kernel(device) is not None else 0
    except CudaError:  # no memory left
        return 0


def give_back_counter(device: int, counter: int) -> None:
    """Nothing will be launched for that block any more, and what was has run."""
    if counter:
        _counters(device).give_back(counter)
