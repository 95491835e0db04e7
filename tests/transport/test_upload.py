"""Tensors that go to the GPU while their message is still coming, without a GPU: what is copied when, and from where.

Host memory stands in for the GPU's; `tests/cuda/test_over_tcp.py` has the same on a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from telegrad.cuda import host, order, upload
from telegrad.cuda.forms import Form, empty
from telegrad.cuda.runtime import CudaError
from telegrad.cuda.upload import LEAST, Upload, Uploaded, Wanted
from telegrad.transport import tensor_memory
from telegrad.transport.blocks.heap import Heap
from telegrad.transport.connection import Connection
from telegrad.transport.tensor_memory import TensorMemory
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import INLINE, Frame, FrameKind, SegmentSpec, encode_prefix
from telegrad.wire.messages import Ping, PythonReply
from telegrad.wire.tensor import on_device
from telegrad.wire.tensor.tensors import TensorSpec, describe, rebuild
from tests.transport.test_connection import make_pair
from tests.transport.test_stripes import Pair, in_thread, receive

CUDA = torch.device("cuda", 0)
MB = 2**20


class Gpu:
    """Stands in for the CUDA runtime: copies at once, and notes it."""

    def __init__(self) -> None:
        self.copied: list[int] = []  # bytes
        self.waits = 0
        self.kept: list[Any] = []  # host memory that is still to be read
        self.followed = 0
        self.broken = False
        self.room = 2**40  # bytes that may still be taken

    def reserve(self, device: int, nbytes: int) -> bool:
        assert device == 0
        if nbytes > self.room:
            return False
        self.room -= nbytes
        return True

    def drop(self, device: int, nbytes: int) -> None:
        assert device == 0
        self.room += nbytes

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copy_rows((target, 0), (source, 0), nbytes, 1, stream)

    def copy_rows(self, target: Any, source: Any, nbytes: int, count: int, stream: int) -> None:
        assert stream == 5
        if self.broken:
            raise CudaError("broken")
        for row in range(count):
            ctypes.memmove(target[0] + row * target[1], source[0] + row * source[1], nbytes)
        self.copied.append(nbytes * count)

    def synchronize(self, stream: int) -> None:
        assert stream == 5
        self.waits += 1

    def keep(self, memory: Any, devices: Any) -> Any:
        self.kept.append(memory)
        assert set(devices) == {CUDA}
        return {torch.device("cpu"): len(self.kept)}  # where the tensors are that stand in

    def use_here(self, tensor: torch.Tensor, behind: int | None) -> None:
        assert behind in (None, len(self.kept))
        self.followed += behind is not None


def allocate(wanted: Wanted) -> torch.Tensor:
    return empty(wanted.form or Form(torch.uint8, (wanted.nbytes,), ()), torch.device("cpu"))


@contextlib.contextmanager
def stand_in() -> Iterator[Gpu]:
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu()
        patch.setattr(upload, "runtime", lambda: gpu)
        patch.setattr(host, "runtime", lambda: gpu)
        patch.setattr(upload, "keep", gpu.keep)
        patch.setattr(upload, "use_here", gpu.use_here)
        patch.setattr(upload, "stream_of", lambda _: 5)
        patch.setattr(upload, "allocate", allocate)
        patch.setattr(upload, "on_device", lambda _: contextlib.nullcontext())
        patch.setattr(tensor_memory, "device_of", torch.device)
        patch.setattr(order, "active", True)
        patch.setattr(tensor_memory, "budget", gpu)
        yield gpu


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with stand_in() as made:
        yield made


heap = Heap()


def pinned(nbytes: int) -> Any:
    """Receive memory that is pinned, as far as anybody looks."""
    memory = heap.allocate(nbytes)
    memory.mapping.seen_at = 1
    return memory


def on_gpu(*tensors: torch.Tensor, others: int = 0) -> tuple[list[TensorSpec], Any]:
    """Specs and segments of tensors that go to the GPU, all but the last few."""
    specs, segments = describe(list(tensors))
    count = len(specs) - others
    return [msgspec.structs.replace(spec, device="cuda:0") for spec in specs[:count]] + specs[count:], segments


def floats_on(buffer: Any, device: torch.device) -> torch.Tensor:
    return torch.empty(0).set_(buffer.storage_on(device))


def begun(memory: Any, nbytes: int, wanted: list[Wanted], gpu: Gpu) -> Upload:
    made = Upload(memory, 0, nbytes, wanted, gpu)
    made.prepare()
    return made


# --- what is copied when ---


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), min_size=1, max_size=6),
    st.lists(st.integers(0, 400), max_size=3),
    st.integers(1, 20),
    st.integers(0, 2**32),
)
def test_all_that_is_wanted_arrives_in_whatever_steps_it_comes(
    segments: list[tuple[int, int]], cuts: list[int], piece: int, seed: int
) -> None:
    """Segments with gaps between them, read in parts, by several threads: in any order, whatever comes at once."""
    wanted, total, choice = [], 0, random.Random(seed)
    for number, (size, gap) in enumerate(segments):
        wanted.append(Wanted(number, total + gap, size, CUDA))
        total += gap + size
    memory = pinned(total)
    memory[:total] = bytes(i % 251 for i in range(total))
    with stand_in() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "_IN_STEPS_FROM", piece)
        going = begun(memory, total, wanted, gpu)
        bounds = sorted({0, total, *[cut for cut in cuts if cut < total]})
        parts = [(going.part(a, b), iter([*sorted(choice.choices(range(a, b), k=5)), b])) for a, b in pairwise(bounds)]
        while parts:
            part = choice.choice(parts)
            place = next(part[1], None)
            if place is None:
                parts.remove(part)
            else:
                part[0](place)
        assert sum(gpu.copied) == sum(size for size, _ in segments), "each byte once"
        for one in wanted:
            tensor = going.take(one.segment)
            assert tensor is not None
            assert bytes(tensor.tolist()) == memory[one.start : one.start + one.nbytes]
        assert gpu.room == 2**40, "it is the program's now"
        assert gpu.kept == [memory] and gpu.followed == len(wanted) and not gpu.waits, "nobody waits for the GPU"


def test_pieces_are_copied_before_the_message_is_complete(gpu: Gpu) -> None:
    """The reader alone, fed by hand: nothing depends on how sockets divide what comes."""
    nbytes = 5 * MB
    specs = (TensorSpec(0, 0, (nbytes,), (), 0, 0, 0, "cuda:0"),)
    table = (SegmentSpec(nbytes, INLINE, 0),)
    raw = encode_prefix(FrameKind.REPLY, 1, 0, Ping(), specs, table, 0, nbytes) + bytes(nbytes)
    reader = FrameReader(pinned)
    reader.uploading = TensorMemory.upload
    copied, frames, at = [], [], 0
    while at < len(raw):
        count = min(len(reader.target), 300_000, len(raw) - at)
        reader.target[:count] = raw[at : at + count]
        frames += reader.received(count)
        at += count
        copied.append(sum(gpu.copied))
    (frame,) = frames
    late = [at - done for at, done in zip(itertools.accumulate(itertools.repeat(300_000)), copied[:-1], strict=False)]
    assert max(late) < nbytes // 2 + 400_000
    assert copied[-2] >= nbytes // 2, "little is left for the end"
    assert copied[-1] == nbytes and gpu.waits == 0, "the thread that reads waits for nothing"
    assert isinstance(frame.upload, Upload)


def test_a_step_goes_up_when_all_parts_have_come_so_far_and_a_small_part_at_once(gpu: Gpu) -> None:
    for part, steps in ((4 * MB, [8, 6, 2]), (16, [16])):
        gpu.copied.clear()
        going = begun(pinned(4 * part), 4 * part, [Wanted(0, 0, 4 * part, CUDA)], gpu)
        reached = [going.part(start, start + part) for start in range(0, 4 * part, part)]
        starts = range(0, 4 * part, part)
        for place in (1, 7 * part // 16, *itertools.accumulate(step * part // 16 for step in steps)):
            before = list(gpu.copied)
            for index, start in reversed(list(enumerate(starts))):
                assert gpu.copied == before
                reached[index](start + place)
        assert gpu.copied == [4 * step * part // 16 for step in steps], "one call for a step of all"


def test_what_is_kept_for_the_gpu_is_limited(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_MOST_KEPT", 0)
    going = begun(pinned(4 * MB), 4 * MB, [Wanted(0, 0, 2 * MB, CUDA), Wanted(1, 2 * MB, 2 * MB, CUDA)], gpu)
    going.part(0, 4 * MB)(4 * MB)
    assert going.take(0) is not None and going.take(1) is not None
    assert gpu.waits == 1 and not gpu.kept and not gpu.followed


class Passes:
    """Stands in for an event of CUDA."""

    def __init__(self) -> None:
        self.passed = False

    def record(self, _: object) -> None: ...

    def query(self) -> bool:
        return self.passed


def test_memory_is_kept_until_the_gpu_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", Passes)
    events: list[Any] = []
    for _ in range(2):
        events += upload.keep(heap.allocate(MB), [CUDA]).values()
    assert len(upload._kept) == 2
    events[1].passed = True
    upload.collect()
    assert len(upload._kept) == 2, "in their order: one stream copies"
    events[0].passed = True
    upload.collect()
    assert not upload._kept


def test_what_has_not_come_is_not_taken(gpu: Gpu) -> None:
    going = begun(pinned(4 * MB), 4 * MB, [Wanted(0, 0, 4 * MB, CUDA)], gpu)
    going.part(0, 4 * MB)(3 * MB)
    assert gpu.copied and going.take(0) is None and gpu.waits == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 5)), max_size=12))
def test_copies_that_are_made_together_are_all_of_them(gaps: list[tuple[int, int, int]]) -> None:
    """Whatever lies how far from what: each byte goes where it would by itself, and nothing else does."""
    source = bytearray(range(1, 200))
    target, wanted = bytearray(200), bytearray(200)
    to, of = (ctypes.addressof(ctypes.c_char.from_buffer(data)) for data in (target, source))
    copies, at, come = [], 0, 0
    for gap, skip, nbytes in gaps:
        at, come = at + gap, come + skip
        copies.append(host.Copy(to + at, of + come, nbytes))
        wanted[at : at + nbytes] = source[come : come + nbytes]
        at, come = at + nbytes, come + nbytes
    with stand_in() as gpu:
        host.copy_together(copies, 5)
        assert target == wanted
        assert len(gpu.copied) <= len(copies)
        if len({(gap, skip, nbytes) for gap, skip, nbytes in gaps}) == 1:
            assert len(gpu.copied) == 1


def test_rows_that_are_too_far_apart_are_copied_one_by_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FARTHEST", 100)
    source, target = bytearray(200), bytearray(200)
    to, of = (ctypes.addressof(ctypes.c_char.from_buffer(data)) for data in (target, source))
    host.copy_together([host.Copy(to, of, 5), host.Copy(to + 10, of + 100, 5)], 5)
    host.copy_together([host.Copy(to, of, 5), host.Copy(to + 10, of - 3 + 3, 5)], 5)
    assert gpu.copied == [5] * 4


# --- over connections ---


@pytest.fixture(params=["one", "several", "sealed"])
def ends(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[tuple[Connection, Connection]]:
    if request.param == "one":
        a, b = make_pair(shared=False)
        with closing(a), closing(b):
            b._reader._allocate = pinned
            yield a, b
    else:
        with closing(Pair(3, sealed=request.param == "sealed")) as pair:
            pair.ends[1]._reader._allocate = pinned
            yield pair.ends[0], pair.ends[1]


def pass_on(ends: tuple[Connection, Connection], specs: list[TensorSpec], segments: Any) -> Frame:
    send = functools.partial(ends[0].send, FrameKind.REPLY, 1, 0, PythonReply(), b"payload", specs, segments)
    with in_thread(send) as outcome:
        frames = receive(ends[1])
    assert outcome == [None] and frames is not None
    assert bytes(frames[0].payload) == b"payload"
    return frames[0]


def test_tensors_for_the_gpu_are_there_when_the_message_is(ends: tuple[Connection, Connection], gpu: Gpu) -> None:
    x, y, small, on_host = torch.randn(3, 600_000), torch.randn(400_001), torch.randn(3), torch.randn(500_000)
    for _ in range(2):
        gpu.copied.clear()
        frame = pass_on(ends, *on_gpu(x, y, small, on_host, others=1))
        assert [type(buffer) for buffer in frame.buffers] == [Uploaded, Uploaded, memoryview, memoryview]
        assert sum(gpu.copied) == x.nbytes + y.nbytes
        for sent, buffer in zip((x, y), frame.buffers[:2], strict=True):
            assert buffer.nbytes == sent.nbytes
            assert torch.equal(floats_on(buffer, CUDA), sent.flatten())
        assert torch.equal(torch.frombuffer(frame.buffers[3], dtype=torch.float32), on_host)
        assert frame.upload is None


def test_a_plain_tensor_is_taken_as_it_came(
    ends: tuple[Connection, Connection], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its form from the beginning, and nothing is put together at the end."""
    monkeypatch.setattr(on_device, "device_of", torch.device)
    monkeypatch.setattr(on_device, "_known", {})
    x, parameter = torch.randn(3, 600_000), torch.nn.Parameter(torch.randn(400_001, 2).t())
    for sent in ([x], [parameter], [x, parameter]):
        specs, segments = on_gpu(*sent)
        frame = pass_on(ends, specs, segments)
        made = [tensor.data_ptr() for tensor in frame.buffers[0]._upload._tensors.values()]
        found = rebuild(specs, frame.buffers)
        assert [tensor.data_ptr() for tensor in found] == made
        for one, came in zip(sent, found, strict=True):
            assert torch.equal(one, came) and one.stride() == came.stride() and type(one) is type(came)
            assert came.requires_grad == one.requires_grad and came.is_leaf and came._base is None
    assert not gpu.waits


def test_a_plain_tensor_is_taken_from_the_host_if_it_is_not_on_the_gpu(
    ends: tuple[Connection, Connection], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "device_of", torch.device)
    monkeypatch.setattr(on_device, "_known", {})
    gpu.broken = True
    monkeypatch.setattr(
        upload, "to_device", lambda view, _: torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    )
    monkeypatch.setattr(upload, "empty", lambda form, _: empty(form, torch.device("cpu")))
    x = torch.randn(3, 600_000)
    specs, segments = on_gpu(x)
    (found,) = rebuild(specs, pass_on(ends, specs, segments).buffers)
    assert torch.equal(found, x)


def test_threads_that_read_wait_until_there_is_memory_on_the_gpu(gpu: Gpu) -> None:
    going = Upload(pinned(4 * MB), 0, 4 * MB, [Wanted(0, 0, 4 * MB, CUDA)], gpu)
    with in_thread(functools.partial(going.part(0, 4 * MB), 3 * MB)):
        assert not gpu.copied
        going.prepare()
    assert gpu.copied == [2 * MB]


def test_what_the_reading_thread_is_in_is_not_seen_in_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a user's, and the tensor another's."""
    monkeypatch.setattr(upload, "_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    with torch.inference_mode():
        made = upload.allocate(Wanted(0, 0, 12, torch.device("cpu"), Form(torch.float32, (3,), ())))
    assert not made.is_inference() and made.shape == (3,)


def test_a_mode_of_the_reading_thread_sees_no_tensor_of_others(gpu: Gpu) -> None:
    going = Upload(pinned(LEAST), 0, LEAST, [Wanted(0, 0, LEAST, CUDA)], gpu)
    with FakeTensorMode():
        going.prepare()
    view = memoryview(bytearray(LEAST))
    assert going.segment(0, view) is view and gpu.room == 2**40


def test_a_thread_that_is_interrupted_leaves_no_half_prepared_message(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(upload, "allocate", interrupt)
    going = Upload(pinned(LEAST), 0, LEAST, [Wanted(0, 0, LEAST, CUDA)], gpu)
    with pytest.raises(KeyboardInterrupt):
        going.prepare()
    going.part(0, LEAST)(LEAST)
    view = memoryview(bytearray(LEAST))
    assert going.segment(0, view) is view and not gpu.copied and gpu.room == 2**40


def test_memory_that_is_not_pinned_is_copied_as_a_whole(ends: tuple[Connection, Connection], gpu: Gpu) -> None:
    ends[1]._reader._allocate = heap.allocate
    heap._idle.clear()
    frame = pass_on(ends, *on_gpu(torch.randn(900_000)))
    assert type(frame.buffers[0]) is memoryview and not gpu.copied


def test_a_copy_that_fails_is_made_again_from_the_host(
    ends: tuple[Connection, Connection], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.broken = True
    x = torch.randn(900_000)
    frame = pass_on(ends, *on_gpu(x))
    made = []
    monkeypatch.setattr(upload, "to_device", lambda view, device: made.append((bytes(view), device)))
    frame.buffers[0].storage_on(CUDA)
    assert made == [(x.numpy().tobytes(), CUDA)]
    assert torch.equal(floats_on(frame.buffers[0], torch.device("cpu")), x)


def test_what_nobody_takes_is_not_used_again_before_the_gpu_has_read_it(gpu: Gpu) -> None:
    memory = pinned(4 * MB)
    going = begun(memory, 4 * MB, [Wanted(0, 0, 4 * MB, CUDA)], gpu)
    going.part(0, 4 * MB)(3 * MB + 1)
    (returns,) = [ref for ref in heap._refs.values() if ref() is memory]
    del memory
    assert returns() is not None and not gpu.waits and gpu.room == 2**40 - 4 * MB
    del going
    gc.collect()
    assert returns() is None and gpu.waits == 1 and gpu.room == 2**40


# --- what a peer may say ---


def frame_with(specs: list[TensorSpec], *segments: SegmentSpec) -> Frame:
    return Frame(int(FrameKind.REPLY), 1, 0, Ping(), tuple(specs), segments=segments)


def spec(segment: int, device: str = "cuda:0") -> TensorSpec:
    return TensorSpec(0, 0, (LEAST,), (), 0, segment, 0, device)


@pytest.mark.parametrize(
    "segments",
    [
        [SegmentSpec(LEAST, INLINE, 0), SegmentSpec(LEAST, INLINE, LEAST - 1)],
        [SegmentSpec(LEAST, INLINE, LEAST), SegmentSpec(LEAST, INLINE, 0)],
        [SegmentSpec(LEAST, INLINE, 0), SegmentSpec(LEAST, INLINE, 2 * LEAST + 1)],
        [SegmentSpec(LEAST, INLINE, -1)],
        [SegmentSpec(2**62, INLINE, 0)],
        [SegmentSpec(LEAST - 1, INLINE, 0)],
        [SegmentSpec(-LEAST, INLINE, 0)],
        [SegmentSpec(LEAST, 3, 0)],
    ],
    ids=["overlap", "backwards", "beyond the end", "before the start", "huge", "small", "negative", "in a block"],
)
def test_odd_segments_take_no_memory(segments: list[SegmentSpec], gpu: Gpu) -> None:
    memory = pinned(3 * LEAST)
    frame = frame_with([spec(0), spec(1)], *segments)
    assert TensorMemory.upload(frame, memory, 0, 3 * LEAST) is None


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:0", ""), ("", "")])
def test_what_goes_to_several_places_is_left_to_who_builds_it(devices: tuple[str, str], gpu: Gpu) -> None:
    memory = pinned(3 * LEAST)
    frame = frame_with([spec(0, device) for device in devices], SegmentSpec(LEAST, INLINE, 0))
    assert TensorMemory.upload(frame, memory, 0, LEAST) is None


@pytest.mark.parametrize(
    "odd",
    [{"dtype": 999}, {"shape": (-LEAST,)}, {"shape": (2**62, 2**62)}, {"shape": (LEAST + 1,)}, {"strides": (2,)}],
    ids=["dtype", "negative", "huge", "longer", "strides"],
)
def test_what_is_odd_about_a_tensor_is_left_to_who_builds_it(
    odd: dict[str, Any], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes go up as those of any other, and the connection stays."""
    monkeypatch.setattr(on_device, "device_of", torch.device)
    monkeypatch.setattr(on_device, "_known", {})
    frame = frame_with([msgspec.structs.replace(spec(0), **odd)], SegmentSpec(LEAST, INLINE, 0))
    going = TensorMemory.upload(frame, pinned(LEAST), 0, LEAST)
    assert going is not None
    assert [one.form for one in going._wanted] == [None]


def test_no_room_on_the_gpu_is_told_to_who_takes_the_tensor(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(upload, "allocate", refuse)
    frame = frame_with([spec(0)], SegmentSpec(LEAST, INLINE, 0))
    going = TensorMemory.upload(frame, pinned(LEAST), 0, LEAST)
    assert going is not None
    going.prepare()
    assert gpu.room == 2**40
    going.part(0, LEAST)(LEAST)
    view = memoryview(bytearray(LEAST))
    assert going.segment(0, view) is view and not gpu.copied


def test_what_waits_for_somebody_to_take_it_is_limited(gpu: Gpu) -> None:
    gpu.room = 2 * LEAST
    frame = frame_with([spec(0), spec(1)], SegmentSpec(LEAST, INLINE, 0), SegmentSpec(LEAST, INLINE, LEAST))
    waits = TensorMemory.upload(frame, pinned(2 * LEAST), 0, 2 * LEAST)
    assert waits is not None and gpu.room == 0
    assert TensorMemory.upload(frame, pinned(2 * LEAST), 0, 2 * LEAST) is None
    waits.prepare()
    waits.part(0, 2 * LEAST)(2 * LEAST)
    assert waits.take(1) is not None and gpu.room == LEAST
    assert TensorMemory.upload(frame, pinned(2 * LEAST), 0, 2 * LEAST) is None and gpu.room == LEAST
    del waits
    assert gpu.room == 2 * LEAST


# --- the way down ---


class LateCopies:
    """Stands in for the runtime and a stream: a copy is made when an event behind it is waited for, and not before."""

    cuda_stream = 7
    device_index = 0

    def __init__(self) -> None:
        self.enqueued: list[tuple[int, int, int]] = []

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        assert stream == self.cuda_stream
        self.enqueued.append((target, source, nbytes))

    def copy_rows(self, target: Any, source: Any, nbytes: int, count: int, stream: int) -> None:
        for row in range(count):
            self.copy(target[0] + row * target[1], source[0] + row * source[1], nbytes, stream)

    def event(self) -> LateEvent:
        return LateEvent(self)


class LateEvent:
    def __init__(self, copies: LateCopies) -> None:
        self._copies = copies
        self._until = 0

    def record(self, stream: LateCopies) -> None:
        self._until = len(stream.enqueued)

    def query(self) -> bool:
        return not any(nbytes for _, _, nbytes in self._copies.enqueued[: self._until])

    def synchronize(self) -> None:
        for index in range(self._until):
            if (enqueued := self._copies.enqueued[index])[2]:
                ctypes.memmove(*enqueued)
                self._copies.enqueued[index] = (0, 0, 0)


@contextlib.contextmanager
def small_chunks(copies: Any) -> Iterator[None]:
    """The sizes divided by 2**18, so that the buffer is used again and again."""
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "runtime", lambda: copies)
        patch.setattr(torch.cuda, "Event", copies.event)
        patch.setattr(host, "on_device", lambda _: contextlib.nullcontext())
        patch.setattr(torch, "empty", lambda size, **_: empty(size, dtype=torch.uint8))
        patch.setattr(host, "_CHUNK", 32)
        patch.setattr(host, "_PIECES_FROM", 16)
        patch.setattr(host, "_ALIGNMENT", 1)
        host._plan.cache_clear()
        yield
    host._plan.cache_clear()


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_what_comes_down_in_chunks_is_all_of_it_in_order(nbytes: int, seed: int) -> None:
    source = bytearray(random.Random(seed).randbytes(nbytes))
    copies: Any = LateCopies()
    with small_chunks(copies):
        address = ctypes.addressof(ctypes.c_char.from_buffer(source))
        came, lengths = b"", []
        for chunk in host.DeviceBytes(address, nbytes, 0, source, copies).chunks():
            came += chunk
            lengths.append(len(chunk))
            assert len(copies.enqueued) <= max(4, len(lengths) + 1), "one is on its way while one is written"
        assert came == source
        assert lengths[0] <= 16 and max(lengths) <= 32


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_parts_that_come_down_together_do_not_mix(sizes: list[int], random: random.Random) -> None:
    """The first chunks of all before the second of any; then each part at the pace of its own thread."""
    sources = [bytearray(random.randbytes(size)) for size in sizes]
    copies: Any = LateCopies()
    with small_chunks(copies):
        parts = [
            host.DeviceBytes(ctypes.addressof(ctypes.c_char.from_buffer(source)), len(source), 0, source, copies)
            for source in sources
        ]
        host.bring_down(parts)
        firsts = [min(32, size) // 8 if size >= 16 else size for size in sizes]
        assert [nbytes for _, _, nbytes in copies.enqueued[: len(sizes)]] == firsts
        readers = [part.chunks() for part in parts]
        came = [b""] * len(sizes)
        left = list(range(len(sizes)))
        while left:
            index = random.choice(left)
            chunk = next(readers[index], None)
            if chunk is None:
                left.remove(index)
            else:
                came[index] += chunk
    assert came == sources


def test_a_part_that_nobody_writes_is_waited_for_before_its_buffer_is_free() -> None:
    source = bytearray(random.Random(1).randbytes(100))
    copies: Any = LateCopies()
    with small_chunks(copies):
        data = host.DeviceBytes(ctypes.addressof(ctypes.c_char.from_buffer(source)), 100, 0, source, copies)
        host.bring_down([data])
        assert [nbytes for _, _, nbytes in copies.enqueued] == [4, 12, 16, 32], "as much as there is room for"
        del data
        assert all(not nbytes for _, _, nbytes in copies.enqueued), "the copies are done"
