"""The few calls of CUDA that torch does not offer, on the libraries torch itself has loaded.

Memory that another process can open (CUDA IPC), copies that need no tensors, pinning of memory that is mapped already,
streams that wait for a number in memory, and kernels of this package's own. Pointers and streams are plain integers
here. Every call checks what it returns, and clears the error: the runtime would report it again to whoever asks next,
which is torch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch

HANDLE_BYTES = 64  # of an exported piece of memory
FARTHEST = 2**31  # bytes from one row to the next that CUDA does not copy together
_SUCCESS, _NO_CONTEXT = 0, 201
_DEFAULT_DIRECTION = 4  # the runtime knows where an address lies
_FOR_ALL_DEVICES, _MAPPED = 0x1, 0x2
_AT_LEAST = 0  # a stream waits until the number is that large, counted in a circle of 32 bits
_NON_BLOCKING = 1  # a stream that the default one does not wait for, nor it for that
_BUFFER_ID, _RANGE_START, _RANGE_SIZE = 7, 11, 12  # attributes of a pointer
_PEER_ACCESS = 1  # opened memory of another GPU is made reachable, where that is possible


class CudaError(RuntimeError):
    """The CUDA runtime refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cudaMalloc": (ctypes.POINTER(_POINTER), ctypes.c_size_t),
    "cudaFree": (_POINTER,),
    "cudaMemGetInfo": (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
    "cudaMemcpyAsync": (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER),
    "cudaMemcpy2DAsync": (
        *(_POINTER, ctypes.c_size_t, _POINTER, ctypes.c_size_t),
        *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, _POINTER),
    ),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cudaIpcOpenMemHandle": (ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_POINTER,),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaHostRegister": (_POINTER, ctypes.c_size_t, ctypes.c_uint),
    "cudaHostUnregister": (_POINTER,),
    "cudaHostGetDevicePointer": (ctypes.POINTER(_POINTER), _POINTER, ctypes.c_uint),
    "cudaMemsetAsync": (_POINTER, ctypes.c_int, ctypes.c_size_t, _POINTER),
    "cudaStreamQuery": (_POINTER,),
    "cudaStreamCreateWithFlags": (ctypes.POINTER(_POINTER), ctypes.c_uint),
    "cudaStreamDestroy": (_POINTER,),
    "cudaGetLastError": (),
}


def is_built() -> bool:
    """Whether this torch was built for CUDA at all."""
    return torch.version.cuda is not None


class Runtime:
    """The library, with a method for each call. What concerns one device is to be called with that device current."""

    def __init__(self) -> None:
        self._library = _find_library()
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        # Bound, since each message makes some of these.
        self._copy = self._library.cudaMemcpyAsync
        self._copy_rows = self._library.cudaMemcpy2DAsync
        self._query = self._library.cudaStreamQuery
        driver = ctypes.CDLL("libcuda.so.1")
        self._driver = driver
        self._write_value = _stream_function(driver, "cuStreamWriteValue32")
        self._wait_value = _stream_function(driver, "cuStreamWaitValue32")
        self._launch = driver.cuLaunchKernel
        self._launch.argtypes = (_POINTER, *[ctypes.c_uint] * 7, _POINTER, _POINTER, _POINTER)
        self._launch.restype = ctypes.c_int
        self._attributes = driver.cuPointerGetAttributes
        self._attributes.argtypes = (ctypes.c_uint, _POINTER, _POINTER, ctypes.c_uint64)
        self._attributes.restype = ctypes.c_int
        self._local = _Asked()

    def _check(self, code: int, what: str) -> None:
        if code != _SUCCESS:
            self._library.cudaGetLastError()
            reason = self._library.cudaGetErrorString(code)
            raise CudaError(f"{what}: {reason.decode(errors='replace') if reason else 'unknown'} (CUDA error {code})")

    # --- memory ---

    def allocate(self, nbytes: int) -> int:
        """Memory of the current device, outside torch's own pool."""
        pointer = _POINTER()
        self._check(self._library.cudaMalloc(ctypes.byref(pointer), nbytes), f"allocating {nbytes} bytes")
        return int(pointer.value or 0)

    def free(self, address: int) -> None:
        """Give memory back. Waits for what the device is doing."""
        self._check(self._library.cudaFree(address), "freeing memory")

    def total_memory(self) -> int:
        """The bytes the current device has."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "asking for the memory")
        return total.value

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two places, on a stream."""
        code = self._copy(target, source, nbytes, _DEFAULT_DIRECTION, stream)
        if code:
            self._check(code, f"copying {nbytes} bytes")

    def copy_rows(self, target: Rows, source: Rows, nbytes: int, count: int, stream: int) -> None:
        """The same for so many bytes at each of `count` places that are equally far from each other, on either side. It
        costs as much as for one place."""
        code = self._copy_rows(*target, *source, nbytes, count, _DEFAULT_DIRECTION, stream)
        if code:
            self._check(code, f"copying {count} times {nbytes} bytes")

    def export_memory(self, address: int) -> bytes:
        """What another process opens this memory with."""
        handle = _Handle()
        self._check(self._library.cudaIpcGetMemHandle(ctypes.byref(handle), address), "exporting memory")
        return bytes(handle)

    def open_memory(self, handle: bytes) -> int:
        """Memory of another process, mapped for the current device."""
        pointer = _POINTER()
        code = self._library.cudaIpcOpenMemHandle(ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
        self._check(code, "opening memory of another process")
        return int(pointer.value or 0)

    def close_memory(self, address: int) -> None:
        """Unmap memory of another process."""
        self._check(self._library.cudaIpcCloseMemHandle(address), "closing memory of another process")

    def pin(self, address: int, nbytes: int) -> None:
        """Let the GPU copy to and from this host memory directly."""
        flags = _FOR_ALL_DEVICES | _MAPPED
        self._check(self._library.cudaHostRegister(address, nbytes, flags), f"pinning {nbytes} bytes")

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._check(self._library.cudaHostUnregister(address), "unpinning memory")

    def seen_by_device(self, address: int) -> int:
        """The address under which the GPU sees pinned memory."""
        pointer = _POINTER()
        code = self._library.cudaHostGetDevicePointer(ctypes.byref(pointer), address, 0)
        self._check(code, "asking where the GPU sees host memory")
        return int(pointer.value or 0)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set device memory, at once: on a stream of its own, since all others may be waiting for what follows."""
        stream = _POINTER()
        code = self._library.cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING)
        self._check(code, "making a stream")
        try:
            self._check(self._library.cudaMemsetAsync(address, byte, nbytes, stream), f"setting {nbytes} bytes")
            self._check(self._library.cudaStreamSynchronize(stream), f"setting {nbytes} bytes")
        finally:
            self._library.cudaStreamDestroy(stream)

    def allocation_of(self, address: int) -> Allocation:
        """The allocation that device memory lies in, this process's or one that it has opened."""
        asked = self._local
        code = self._attributes(3, asked.names, asked.places, address)
        if code == _NO_CONTEXT:
            self._library.cudaFree(None)
            code = self._attributes(3, asked.names, asked.places, address)
        self._check_driver(code, "asking for an allocation")
        return Allocation(*asked.values)

    # --- streams ---

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Once all that is on the stream now is done and can be seen, write a number to memory that the GPU sees."""
        self._on_stream(self._write_value, stream, address, value)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """What comes on the stream from now on waits until the number there is that large. The caller does not."""
        self._on_stream(self._wait_value, stream, address, value)

    def _on_stream(self, function: Any, stream: int, address: int, value: int) -> None:
        code = function(stream, address, value & 0xFFFFFFFF, _AT_LEAST)
        if code == _NO_CONTEXT:  # the driver, unlike the runtime, does not look for one by itself
            self._library.cudaFree(None)
            code = function(stream, address, value & 0xFFFFFFFF, _AT_LEAST)
        if code:
            self._check(code, "a stream and a number in memory")

    def is_idle(self, stream: int) -> bool:
        """Whether all work on a stream is done."""
        code = self._query(stream)
        if code:
            self._library.cudaGetLastError()
        return not code

    def synchronize(self, stream: int) -> None:
        """Return when all work on a stream is done. Other threads run meanwhile."""
        self._check(self._library.cudaStreamSynchronize(stream), "waiting for a stream")

    # --- kernels ---

    def load_kernel(self, code: bytes, name: bytes) -> int:
        """A kernel of a text in PTX, for the current device."""
        self._library.cudaFree(None)  # the driver looks for no context by itself
        module, function = _POINTER(), _POINTER()
        self._check_driver(self._driver.cuModuleLoadData(ctypes.byref(module), code), "loading a kernel")
        self._check_driver(self._driver.cuModuleGetFunction(ctypes.byref(function), module, name), "finding a kernel")
        return int(function.value or 0)

    def launch(self, function: int, blocks: int, threads: int, stream: int, parameters: Any) -> None:
        """Enqueue a kernel of the current device; `parameters` point to its arguments."""
        code = self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None)
        if code == _NO_CONTEXT:
            self._library.cudaFree(None)
            code = self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None)
        if code:
            self._check_driver(code, "launching a kernel")

    def _check_driver(self, code: int, what: str) -> None:
        if code != _SUCCESS:
            raise CudaError(f"{what}: the driver refused it (CUDA error {code})")


class Rows(NamedTuple):
    """Places in memory that are equally far from each other."""

    first: int
    distance: int  # less than FARTHEST


class Allocation(NamedTuple):
    """Memory as it was allocated: torch's allocator cuts tensors out of it."""

    identity: int  # of no other allocation of this process, before or after
    start: int
    size: int


class _Asked(threading.local):
    """Room for the answers about a pointer."""

    def __init__(self) -> None:
        self.values = (ctypes.c_uint64 * 3)()
        first = ctypes.addressof(self.values)
        self.names = (ctypes.c_int * 3)(_BUFFER_ID, _RANGE_START, _RANGE_SIZE)
        self.places = (_POINTER * 3)(first, first + 8, first + 16)


class KernelArgument:
    """Room for the one argument of a kernel, for one thread: the call of the driver copies it before it returns."""

    __slots__ = ("memory", "parameters")

    def __init__(self, nbytes: int) -> None:
        self.memory = ctypes.create_string_buffer(nbytes)
        self.parameters = (_POINTER * 1)(ctypes.addressof(self.memory))


def _stream_function(driver: Any, name: str) -> Any:
    function = getattr(driver, f"{name}_v2", None) or getattr(driver, name)
    function.argtypes = (_POINTER, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


@functools.cache
def runtime() -> Runtime:
    """The runtime of this process. CudaError where there is none."""
    return Runtime()


def _find_library() -> Any:
    """The runtime that torch has loaded: another copy of it would not know torch's streams."""
    if torch.version.cuda is None:
        raise CudaError("this torch was built without CUDA")
    torch.cuda.init()  # type: ignore[no-untyped-call] # of torch's
    try:
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libcudart" in line}
        if not paths:
            raise CudaError("torch's CUDA runtime library was not found in this process") from None
        return ctypes.CDLL(paths.pop())
