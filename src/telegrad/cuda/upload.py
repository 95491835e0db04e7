"""Tensors on their way to the GPU while the rest of their message is still coming.

A large message is read into pinned memory, by one thread or by several, each with a part of it. What has come of all of
them is copied to the GPU in three steps, on a stream of their own, so that little is left when the message is complete.
Nobody waits for that: whatever uses the tensors comes behind it on the GPU, and the memory that they came in is kept
until the GPU has read it. The memory on the GPU is of torch's allocator. It was free when the message began, so the
stream follows, as one of a request does, what had been answered until then (`lanes.follow_all`): that may still be at
work in it. It is taken while the first bytes are coming (`Upload.prepare`): the threads that read need not wait for it.

Only memory that is pinned already is used like that, which means that an earlier message came in it and was copied as a
whole (`host.to_device`): pinning takes longer than what it would save. Until somebody takes the tensors, which may be
long if many requests wait, their memory counts as the transport's.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from telegrad.cuda import lanes, order
from telegrad.cuda.forms import Form, empty
from telegrad.cuda.host import Copy, copy_together, on_device, to_device
from telegrad.cuda.runtime import CudaError, runtime

log = logging.getLogger("telegrad.cuda")

LEAST = 2**20  # bytes of a tensor from which this pays
_STEPS = 8, 14, 16  # sixteenths of each part that have come when a step is made: a GPU is far ahead of any socket
_IN_STEPS_FROM = 2**20  # bytes of a part
_PREPARED_SECONDS = 60.0  # in which whoever began to read a message has done the rest, with much to spare
_FIRST_OF_ALL = -1  # the priority of a stream of torch's: those are no request's and no pass's


class Wanted(NamedTuple):
    """Bytes of a message that go to a GPU."""

    segment: int  # their number among those of the message
    start: int
    nbytes: int
    device: torch.device
    form: Form | None = None  # of the tensor they are, if they are one


class Budget(Protocol):
    """How much memory of each GPU may be taken by what is not the program's."""

    def reserve(self, device: int, nbytes: int) -> bool:
        """Count memory as taken; False if it would be too much."""

    def drop(self, device: int, nbytes: int) -> None:
        """It is the program's now, or free. For finalizers, too."""


def begin(memory: Any, offset: int, nbytes: int, wanted: Sequence[Wanted], budget: Budget) -> Upload | None:
    """Of `nbytes` that will be put into `memory` from `offset` on some are wanted, in this order; None if they have to
    be copied when all is there."""
    mapping = getattr(memory, "mapping", None)
    if not wanted or mapping is None or not mapping.seen_at:
        return None
    try:
        return Upload(memory, offset, nbytes, wanted, budget)
    except RuntimeError as error:  # no room
        log.debug("a message is copied to the GPU when all of it is there: %s", error)
        return None


class Upload:
    """Copies of what has come of one message. Threads that read its parts enqueue them, once the one that began to read
    it has prepared that; one thread takes the tensors, after all of it has come. `_lock` guards what is to come."""

    def __init__(self, memory: Any, offset: int, nbytes: int, wanted: Sequence[Wanted], budget: Budget) -> None:
        self._copying = False  # whether there may be copies that nobody waits for
        self._failed = False
        self._done: dict[torch.device, torch.cuda.Event] = {}  # what is recorded behind them
        self._budget = budget
        self._reserved: dict[int, Wanted] = {}  # what nobody has taken, by segment
        for one in wanted:
            if not budget.reserve(one.device.index, one.nbytes):
                raise RuntimeError("what waits on the GPU for somebody to take it is as much as may be")
            self._reserved[one.segment] = one
        self._memory = memory  # kept until the GPU has read it
        self._address = ctypes.addressof(memory) + offset
        self._lock = threading.Lock()
        self._to_come = [nbytes] * len(_STEPS)  # by step: bytes of the parts that have not come so far
        self._parts: list[list[int]] = []  # of each part: where it begins, and where each step of it ends
        self._wanted = wanted
        self._starts = [one.start for one in wanted]
        self._prepared = threading.Event()
        self._tensors: dict[int, Tensor] = {}
        self._targets: list[int] = []

    def prepare(self) -> None:
        """Take memory on the GPU. Before the first step is made, which waits for this."""
        try:
            if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
                raise RuntimeError("a mode of torch's is on in the thread that reads")
            lanes.follow_all(lambda index: _stream(torch.device("cuda", index)), order.now())
            self._tensors = {one.segment: allocate(one) for one in self._wanted}
            self._targets = [tensor.data_ptr() for tensor in self._tensors.values()]
        except RuntimeError as error:  # torch's or CUDA's: there is no memory, which whoever takes the tensor is told
            log.debug("a message is copied to the GPU when all of it is there: %s", error)
            self._give_up()
        except BaseException:  # an interrupt, in the thread of a user that reads its reply
            self._give_up()
            raise
        finally:
            self._prepared.set()

    def _give_up(self) -> None:
        self._failed = True
        self._tensors = {}
        for segment in list(self._reserved):
            self._release(segment)

    def part(self, start: int, stop: int) -> Callable[[int], None]:
        """A thread reads the bytes from `start` to `stop`, in order: what it calls with the place it has reached.

        A step is made for all parts together, by the thread that is the last to reach it: threads wait for each other
        within calls of CUDA, and a call that comes alone after a while takes as long as several that come together."""
        size = stop - start
        steps = _STEPS if size >= _IN_STEPS_FROM else (_STEPS[-1],) * len(_STEPS)
        ends = [start + (size * sixteenths // 16) for sixteenths in steps]
        self._parts.append([start, *ends])
        step = 0

        def reached(place: int) -> None:
            nonlocal step
            while step < len(ends) and place >= ends[step]:
                with self._lock:
                    self._to_come[step] -= size
                    last = not self._to_come[step]
                if last:
                    self._copy([(part[step], part[step + 1]) for part in sorted(self._parts)])
                step += 1

        return reached

    def _copy(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies of what is wanted of these bytes."""
        if not self._prepared.wait(_PREPARED_SECONDS) or self._failed:
            self._failed = True
            return
        self._copying = True
        by_device: dict[int, list[Copy]] = {}
        for start, stop in ranges:
            for index in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._wanted)):
                one = self._wanted[index]
                if one.start >= stop:
                    break
                first, last = max(start, one.start), min(stop, one.start + one.nbytes)
                if first < last:
                    copy = Copy(self._targets[index] + first - one.start, self._address + first, last - first)
                    by_device.setdefault(one.device.index, []).append(copy)
        for device, copies in by_device.items():
            try:
                with on_device(device):
                    copy_together(copies, stream_of(torch.device("cuda", device)))
            except CudaError as error:
                log.debug("a message is copied to the GPU when all of it is there: %s", error)
                self._failed = True

    def segment(self, number: int, view: memoryview) -> Any:
        """What stands for a segment of the message, which came in `view`."""
        one = self._reserved.get(number)
        return view if one is None else Uploaded(self, one, view)

    def take(self, segment: int) -> Tensor | None:
        """What a segment was to become, for this thread's current stream; None if its bytes are not there."""
        if self._failed or self._to_come[-1]:
            self._wait()
            return None
        if self._copying and not room_to_keep(self._memory):
            self._wait()
            if self._failed:
                return None
        if self._copying:
            self._copying = False
            self._done = keep(self._memory, {one.device for one in self._wanted})
        tensor = self._tensors[segment]
        use_here(tensor, self._done.get(tensor.device))
        self._release(segment)
        return tensor

    def _release(self, segment: int) -> None:
        one = self._reserved.pop(segment, None)
        if one is not None:
            self._budget.drop(one.device.index, one.nbytes)

    def _wait(self) -> None:
        """Return when the copies are done."""
        if self._copying:
            self._copying = False
            try:
                for device in {one.device for one in self._wanted}:
                    runtime().synchronize(stream_of(device))
            except CudaError as error:
                log.debug("copies to the GPU failed: %s", error)
                self._failed = True

    def __del__(self) -> None:
        """If nobody took it: its memory is not used again while the GPU reads it."""
        self._wait()
        for segment in list(self._reserved):
            self._release(segment)


class Uploaded:
    """A run of tensor bytes that went to a GPU as it came."""

    __slots__ = ("_upload", "_view", "_wanted", "device", "nbytes")
    granted = True  # like memory that a peer was granted: its tensor is there, and only to be taken

    def __init__(self, upload: Upload, wanted: Wanted, view: memoryview) -> None:
        self._upload = upload
        self._wanted = wanted
        self._view = view
        self.device = wanted.device.index
        self.nbytes = view.nbytes

    def tensor(self, form: Form) -> Tensor:
        """It as a tensor of this form; what follows on the current stream finds its bytes there."""
        segment, _, _, device, known = self._wanted
        tensor = self._upload.take(segment)
        if tensor is not None and form == known:
            return tensor
        made = empty(form, device)
        made.untyped_storage().copy_(to_device(self._view, device) if tensor is None else tensor.untyped_storage())
        return made

    def expect(self, forms: Sequence[Form], device: torch.device) -> None:
        """The next ones come as these did."""

    def storage_on(self, device: torch.device) -> torch.UntypedStorage:
        """It in a storage of its own."""
        if device == self._wanted.device:
            tensor = self._upload.take(self._wanted.segment)
            if tensor is not None:
                return tensor.untyped_storage()
        if device.type == "cuda":
            return to_device(self._view, device)
        return torch.frombuffer(self._view, dtype=torch.uint8).to(device).untyped_storage()


# --- host memory that the GPU still reads ---

_MOST_KEPT = 512 * 2**20  # bytes; beyond it whoever takes a tensor waits for the GPU, as for a slower one
_kept: deque[tuple[Iterable[torch.cuda.Event], Any]] = deque()  # what is recorded behind copies, and what they read
_collecting = threading.Lock()


def room_to_keep(memory: Any) -> bool:
    """Whether not too much is kept already to keep that as well."""
    if _kept_with(memory) > _MOST_KEPT:
        collect()
    return _kept_with(memory) <= _MOST_KEPT


def _kept_with(memory: Any) -> int:
    return sum([ctypes.sizeof(kept) for _, kept in list(_kept)]) + ctypes.sizeof(memory)


def keep(memory: Any, devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Event]:
    """Have host memory live until the copies to these devices that are enqueued now have read it; what tells that."""
    events = {}
    for device in devices:
        event = events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call] # of torch's
        event.record(_stream(device))
    _kept.append((events.values(), memory))
    return events


def collect() -> None:
    """Let go of the memory that the GPU has read. To be called now and then, and before memory is taken to receive in:
    that should be one that is known to the GPU. Never waits."""
    if not _kept or not _collecting.acquire(False):
        return
    try:
        while _kept and all(event.query() for event in _kept[0][0]):  # type: ignore[no-untyped-call]
            _kept.popleft()
    except RuntimeError as error:  # a GPU that has failed, or a graph that is being captured: it is asked again
        log.debug("whether the GPU has read host memory is not known: %s", error)
    finally:
        _collecting.release()


def use_here(tensor: Tensor, behind: torch.cuda.Event | None) -> None:
    """What this thread's current stream does with a tensor from now on comes after an event, if there is one; and its
    memory is not used again before that is done."""
    stream = torch.cuda.current_stream(tensor.device)
    if behind is not None:
        stream.wait_event(behind)
    tensor.record_stream(stream)


def allocate(wanted: Wanted) -> Tensor:
    """Memory of the stream that copies to a device; whatever the mode is in the thread that happens to read."""
    form = wanted.form or Form(torch.uint8, (wanted.nbytes,), ())
    with torch.inference_mode(False), torch.cuda.stream(_stream(wanted.device)):
        return empty(form, wanted.device)


def stream_of(device: torch.device) -> int:
    """That stream, as the CUDA runtime knows it."""
    return int(_stream(device).cuda_stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_FIRST_OF_ALL)  # type: ignore[no-untyped-call] # of torch's
