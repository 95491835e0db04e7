"""The few calls of the CUDA runtime that torch does not offer, on the library torch itself has loaded.

Memory and events that another process can open (CUDA IPC), copies that need no tensors, and pinning of memory that is
mapped already. Pointers, events and streams are plain integers here. Every call checks what it returns, and clears the
error: the runtime would report it again to whoever asks next, which is torch.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

HANDLE_BYTES = 64  # of an exported piece of memory, and of an exported event
_SUCCESS, _NOT_READY = 0, 600
_DEFAULT_DIRECTION = 4  # the runtime knows where an address lies
_EVENT_FLAGS = 0x2 | 0x4  # without a time, and for other processes
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
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cudaIpcOpenMemHandle": (ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_POINTER,),
    "cudaIpcGetEventHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cudaIpcOpenEventHandle": (ctypes.POINTER(_POINTER), _Handle),
    "cudaEventCreateWithFlags": (ctypes.POINTER(_POINTER), ctypes.c_uint),
    "cudaEventDestroy": (_POINTER,),
    "cudaEventRecord": (_POINTER, _POINTER),
    "cudaEventQuery": (_POINTER,),
    "cudaStreamWaitEvent": (_POINTER, _POINTER, ctypes.c_uint),
    "cudaStreamQuery": (_POINTER,),
    "cudaStreamSynchronize": (_POINTER,),
    "cudaHostRegister": (_POINTER, ctypes.c_size_t, ctypes.c_uint),
    "cudaHostUnregister": (_POINTER,),
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
        self._record = self._library.cudaEventRecord
        self._wait = self._library.cudaStreamWaitEvent

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
        self._check(self._library.cudaHostRegister(address, nbytes, 0), f"pinning {nbytes} bytes")

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._check(self._library.cudaHostUnregister(address), "unpinning memory")

    # --- events and streams ---

    def make_event(self) -> int:
        """An event of the current device that can be exported."""
        event = _POINTER()
        self._check(self._library.cudaEventCreateWithFlags(ctypes.byref(event), _EVENT_FLAGS), "making an event")
        return int(event.value or 0)

    def export_event(self, event: int) -> bytes:
        """What another process opens this event with."""
        handle = _Handle()
        self._check(self._library.cudaIpcGetEventHandle(ctypes.byref(handle), event), "exporting an event")
        return bytes(handle)

    def open_event(self, handle: bytes) -> int:
        """An event of another process. Both sides may record it, and wait for it."""
        event = _POINTER()
        code = self._library.cudaIpcOpenEventHandle(ctypes.byref(event), _Handle.from_buffer_copy(handle))
        self._check(code, "opening an event of another process")
        return int(event.value or 0)

    def destroy_event(self, event: int) -> None:
        """Let go of an event, made here or opened."""
        self._check(self._library.cudaEventDestroy(event), "destroying an event")

    def record(self, event: int, stream: int) -> None:
        """The event stands for everything on the stream so far."""
        code = self._record(event, stream)
        if code:
            self._check(code, "recording an event")

    def wait(self, stream: int, event: int) -> None:
        """What comes on the stream from now on waits for the event, as it was last recorded. The caller does not."""
        code = self._wait(stream, event, 0)
        if code:
            self._check(code, "having a stream wait for an event")

    def is_reached(self, event: int) -> bool:
        """Whether all that the event stands for is done."""
        return self._is_done(self._library.cudaEventQuery(event), "asking for an event")

    def is_idle(self, stream: int) -> bool:
        """Whether all work on a stream is done."""
        return self._is_done(self._library.cudaStreamQuery(stream), "asking for a stream")

    def _is_done(self, code: int, what: str) -> bool:
        if code == _NOT_READY:
            self._library.cudaGetLastError()
            return False
        self._check(code, what)
        return True

    def synchronize(self, stream: int) -> None:
        """Return when all work on a stream is done. Other threads run meanwhile."""
        self._check(self._library.cudaStreamSynchronize(stream), "waiting for a stream")


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
