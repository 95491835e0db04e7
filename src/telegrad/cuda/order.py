"""The order of work on the GPU: who must see whose work, without any thread waiting for the GPU.

- Requests and passes run on lanes, and what is handed over to one is done before the lane uses it (`lanes.py`).
- A message carries a number for its memory (`transport/device`), so what the sender had enqueued is done before the
  receiver's stream reads it.
- A value that waits for whoever comes for it, in a future or behind a reference, has a `Mark` of the streams it was
  made on.

A program that has no CUDA tensors never gets further than a look at `active`. All of this is one process's: agents that
share a process share its devices.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

active = False  # whether a CUDA tensor was ever sent or received here, or a device map names a CUDA device
direct = False  # whether tensors may go between processes without a block: the option `cuda_direct`

_lock = threading.Lock()
used: list[int] = []  # the devices in use, by index; one comes after the other, and none goes


class _Local(threading.local):
    def __init__(self) -> None:
        self.events: dict[int, torch.cuda.Event] = {}  # by device; see `wait`


_local = _Local()


def activate() -> None:
    """There may be CUDA tensors in messages from now on, here or at other workers."""
    global active  # noqa: PLW0603 - a module's flag, which costs a call without CUDA the least to look at
    if not active:
        # A leaf used by requests on several streams is no mistake here, and the engine orders them.
        warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if warn is not None:
            warn(False)
    active = True


def use(device: int) -> None:
    """A device of this process has a part in messages from now on."""
    if device in used:
        return
    with _lock:
        if device not in used:
            used.append(device)
    activate()


def devices() -> list[torch.device]:
    """The devices in use."""
    return [torch.device("cuda", index) for index in used]


now = time.monotonic_ns  # a moment, to compare with others of this process


def wait(ours: torch.cuda.Stream, theirs: torch.cuda.Stream) -> None:
    """What comes on `ours` waits for what is on `theirs` now. The same event each time: a stream that waits for one
    waits for what was recorded when it was told to, whatever is recorded later."""
    device = theirs.device_index
    event = _local.events.get(device)
    if event is None:
        event = _local.events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call] # of torch's
    event.record(theirs)
    ours.wait_event(event)


def uses_several_devices() -> bool:
    """Whether more than one device is in use."""
    return len(used) > 1


def no_stream(device: int) -> Any:
    """Stands for functions of torch that only one built for CUDA has."""
    raise RuntimeError(f"cuda:{device} has no streams: this torch was not built for CUDA")


# The current stream of this thread on a device, as the CUDA runtime knows it. Asked for several times for each message.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", no_stream)


@functools.cache
def default_stream(device: int) -> torch.cuda.Stream:
    """The default stream of a device."""
    return torch.cuda.default_stream(device)


# --- handing over ---


class Streams(Protocol):
    """One on each device, as a lane has them."""

    handles: dict[int, int]  # by device: the stream as the CUDA runtime knows it

    def stream(self, device: int) -> torch.cuda.Stream:
        """The one on a device."""


def hand_over(tensors: Iterable[Tensor | None], lane: Streams) -> None:
    """What this thread's current streams made of `tensors` is seen by all that comes on `lane` from now on."""
    waited: set[int] = set()
    for tensor in tensors:
        if tensor is None or not tensor.is_cuda:
            continue
        device = tensor.get_device()
        if lane.handles.get(device) == current_stream(device):
            continue
        stream = lane.stream(device)
        if device not in waited:
            waited.add(device)
            wait(stream, torch.cuda.current_stream(device))
        for part in _with_memory(tensor):
            part.record_stream(stream)


class Mark(NamedTuple):
    """Where on this thread's streams a value was made, for whoever comes for it later."""

    events: list[tuple[torch.device, torch.cuda.Event]]
    tensors: list[Tensor]


def mark(value: Any = None) -> Mark:
    """A mark of now. `value` is what was made: tensors in it, and in lists, tuples and dicts of it, are noted."""
    events = []
    for device in devices():
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # of torch's
        event.record(torch.cuda.current_stream(device))
        events.append((device, event))
    return Mark(events, list(_tensors_in(value, 3)))


def follow(made: Mark) -> None:
    """What was enqueued before a mark is seen by this thread's streams from now on."""
    for device, event in made.events:
        torch.cuda.current_stream(device).wait_event(event)
    keep_memory(made.tensors)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, depth - 1)


def keep_memory(tensors: Iterable[Tensor]) -> None:
    """Tensors of other streams are used on the current ones: their memory is not used again before that is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            for part in _with_memory(tensor):
                part.record_stream(torch.cuda.current_stream(tensor.device))


def synchronize() -> None:
    """Wait for the GPU: for what is too rare for an order of its own, as sending again after a lost connection."""
    for device in devices():
        torch.cuda.synchronize(device)


def _with_memory(tensor: Tensor) -> list[Tensor]:
    """The tensors whose memory one consists of."""
    if tensor.layout is torch.strided:
        return [] if tensor.is_nested else [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.values()]
