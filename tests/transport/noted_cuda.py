"""A stand-in for the CUDA runtime, that notes what is asked of it: for what can be tested without a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad.cuda import copy_kernel
from telegrad.cuda.forms import Form
from telegrad.cuda.runtime import Allocation, CudaError
from telegrad.transport.device import blocks, borrowing, grants, in_place, landing, leftovers, regions, ways
from telegrad.transport.device.blocks import SLAB

MEMORY = 64 * SLAB


class Noted:
    """Stands in for the CUDA runtime: notes what is asked of it."""

    def __init__(self) -> None:
        self._addresses = itertools.count(2**40, 2**32)
        self.memory: dict[int, int] = {}  # by address: bytes
        self.opened: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.idle = True  # whether streams have nothing to do

    def empty(self, form: Form, _: torch.device) -> Tensor:
        """Memory of torch's allocator; that of the host will do."""
        tensor = torch.zeros(form.shape, dtype=form.dtype)
        self.memory[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def is_idle(self, _: int) -> bool:
        return self.idle

    def allocate(self, nbytes: int) -> int:
        address = next(self._addresses)
        self.memory[address] = nbytes
        return address

    def allocation_of(self, address: int) -> Allocation:
        for start, size in self.memory.items():
            if start <= address < start + size:
                return Allocation(start, start, size)
        raise CudaError("no memory of this device")

    def free(self, address: int) -> None:
        del self.memory[address]

    def total_memory(self) -> int:
        return MEMORY * 10

    def export_memory(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open_memory(self, handle: bytes) -> int:
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close_memory(self, address: int) -> None:
        self.opened.remove(address)

    def load_kernel(self, code: bytes, name: bytes) -> int:
        raise CudaError("no kernels here")  # so its work is asked for in calls, which are noted

    def copy(self, *call: Any) -> None:
        self.calls.append(("copy", *call))

    def fill(self, *call: Any) -> None:
        self.calls.append(("fill", *call))

    def wait_value(self, *call: Any) -> None:
        self.calls.append(("wait", *call))

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.calls.append(("write", stream, address, value))


def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """Put one in the place of the runtime."""
    noted = Noted()
    for module in (blocks, borrowing, grants, in_place, landing, regions, ways):
        monkeypatch.setattr(module, "runtime", lambda: noted)
    monkeypatch.setattr(copy_kernel, "runtime", lambda: noted)
    monkeypatch.setattr(copy_kernel, "_kernels", {})
    monkeypatch.setattr(borrowing, "visible_gpus", lambda: ("a gpu",))
    for module in (regions, ways):
        monkeypatch.setattr(module, "gpu_id", lambda _: "a gpu")
    monkeypatch.setattr(landing, "empty", noted.empty)
    budget = blocks.Budget()
    for module in (blocks, landing):
        monkeypatch.setattr(module, "budget", budget)
    monkeypatch.setattr(leftovers, "_collect_later", lambda: None)
    monkeypatch.setattr(borrowing.order, "current_stream", lambda _: 7)
    monkeypatch.setattr("telegrad.cuda.host.pinned", lambda mapping: mapping.address)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    yield noted
    leftovers._unclosed.clear()
    leftovers._left.clear()
    regions.exported.clear()
    regions._opened.clear()
