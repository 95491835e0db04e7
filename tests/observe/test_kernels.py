"""What the profiler says of the GPU, as events of a timeline: without a GPU, with events that look like its."""

import time

import torch
from torch.autograd import DeviceType

from telegrad.observe.events.kernels import Kernel, can_record, on_device, wall_clock_ahead
from telegrad.observe.timeline.chrome import Track, build
from tests.observe.trace_file import check


class Event:
    def __init__(self, name, start, length, device=DeviceType.CUDA, stream=7, annotation=False):
        self._name, self._start, self._length = name, start, length
        self._device, self._stream, self._annotation = device, stream, annotation

    name = lambda self: self._name  # noqa: E731 - methods, as the profiler's events have
    start_ns = lambda self: self._start  # noqa: E731
    duration_ns = lambda self: self._length  # noqa: E731
    device_type = lambda self: self._device  # noqa: E731
    device_index = lambda self: 0  # noqa: E731
    device_resource_id = lambda self: self._stream  # noqa: E731
    is_user_annotation = lambda self: self._annotation  # noqa: E731


def test_what_ran_on_the_device_is_taken_by_this_clock():
    events = [
        Event("gemm", 5_000_000_000, 2_000),
        Event("cudaLaunchKernel", 4_000_000_000, 10, device=DeviceType.CPU),
        Event("step", 5_000_000_000, 9_000, annotation=True),
        Event("copy", 6_000_000_000, 1_000, stream=9),
    ]
    found, lost = on_device(events, 3.0, most=1)
    assert lost == 1
    assert (found[0].name, round(found[0].since, 9), round(found[0].end, 9)) == ("gemm", 2.0, 2.000002)
    found, _ = on_device(events, 3.0)
    timeline = build([Track(0, 1, "worker0", 1, [*found, Kernel(2.000001, 2.000003, "late", 0, 7)], {})], 1)
    check(timeline)
    tracks = [e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name"]
    assert tracks == ["GPU 0, stream 7", "GPU 0, stream 7", "GPU 0, stream 9"]  # what overlaps gets a second track


def test_the_clock_of_the_profiler_is_the_time_of_day():
    torch.ones(1) + 1
    with torch.autograd.profiler.profile(use_kineto=True) as profiled:
        begun = time.monotonic()
        torch.ones(1) + 1
        ended = time.monotonic()
    ahead = wall_clock_ahead()
    (event,) = [e for e in profiled.kineto_results.events() if e.name() == "aten::add"]
    assert begun - 0.1 < event.start_ns() * 1e-9 - ahead < ended + 0.1  # the profiler's own is no better, if busy


def test_without_a_gpu_there_is_nothing_to_record():
    assert can_record() == torch.cuda.is_initialized()
