"""Mapped memory that tensors travel in: a mapping, and the block that gives out aliases of it."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

MIN_BLOCK = 64 * 1024
IDLE_LIMIT = 512 * 2**20  # bytes of unused blocks that a pool keeps for later
MAX_BLOCK = 64 * 2**30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_HUGE_PAGE = 2 * 2**20  # bytes: what is received in such pages is copied a twentieth faster
_MAP_FAILED = ctypes.c_void_p(-1).value


def block_size(nbytes: int) -> int:
    """The size class for `nbytes`: four steps to each power of two, so that at most a fifth is wasted."""
    if nbytes <= MIN_BLOCK:
        return MIN_BLOCK
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class Mapping:
    """Mapped memory, of a file descriptor or of none. Not Python's `mmap`, which would hold a copy of the descriptor
    for as long: a thousand blocks in use must not be a thousand open files. Unmapped when nobody refers to it."""

    def __init__(self, fd: int, size: int) -> None:
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == _MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(error, f"mapping {size} bytes: {os.strerror(error)}")
        if fd < 0 and size >= _HUGE_PAGE:  # a kernel that has none refuses, and that is all
            _libc.madvise(address, size, mmap.MADV_HUGEPAGE)
        self.address: int = address
        self.size = size
        self.seen_at = 0  # where the GPU sees it, if it is pinned
        weakref.finalize(self, _libc.munmap, address, size).atexit = False

    def before_unmapping(self, act: Callable[[int], None]) -> None:
        """Call `act` with the address when nobody refers to this any more. Finalizers run latest first."""
        weakref.finalize(self, act, self.address).atexit = False


class Block:
    """A mapping and the ctypes array type that gives out aliases of it."""

    __slots__ = ("_array_type", "_mapping", "address", "fd", "idle_since", "number", "size")

    def __init__(self, number: int, size: int, fd: int = -1) -> None:
        self._mapping = Mapping(fd, size)
        self.number = number
        self.size = size
        self.fd = fd
        self.idle_since = 0.0
        self.address = self._mapping.address
        self._array_type = ctypes.c_char * size

    @property
    def mapping(self) -> Mapping:
        """The memory itself, which lives as long as something refers to it."""
        return self._mapping

    def alias(self) -> Any:
        """A new ctypes array over the whole block; what is built on it keeps it, and it keeps the mapping."""
        array = self._array_type.from_address(self.address)
        array.mapping = self._mapping  # type: ignore[attr-defined] # torch declares no type for it
        return array

    def close(self) -> None:
        """Close the descriptor. The mapping itself ends with its last alias."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def count_idle_since(idle: list[Block], before: float) -> int:
    """How many of them, from the first on; the last one to come is the first to be used again, so these are oldest."""
    count = 0
    for block in idle:
        if block.idle_since >= before:
            break
        count += 1
    return count
