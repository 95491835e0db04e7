"""Which GPUs this process sees, by names that mean the same in every process: their UUIDs.

Asked of the driver's management library where that is possible: to ask CUDA itself would initialize it, which takes a
second, some memory on each GPU, and makes it unusable in processes that are forked later.
"""

import functools
import logging

import torch

log = logging.getLogger("telegrad.cuda")


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """The UUIDs of the GPUs of this process, in the order of their numbers; none without CUDA."""
    if torch.version.cuda is None:
        return ()
    try:
        count = torch.cuda.device_count()
        if not count:
            return ()
        return _by_management_library(count) or tuple(
            [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        )
    except (RuntimeError, AssertionError, AttributeError, OSError) as error:
        log.warning("the GPUs of this worker cannot be named, so none is used for messages: %s", error)
        return ()


def _by_management_library(count: int) -> tuple[str, ...]:
    """The same without CUDA; nothing if the library does not say."""
    every = torch.cuda._raw_device_uuid_nvml()
    visible = torch.cuda._parse_visible_devices()
    if not every:
        return ()
    found = []
    for one in visible[:count]:
        if isinstance(one, int):
            matching = every[one : one + 1]
        else:
            matching = [gpu for gpu in every if gpu.startswith(one)]
        if len(matching) != 1:  # a part of a GPU, which has a name of its own
            return ()
        found.append(matching[0].removeprefix("GPU-"))
    return tuple(found)


def gpu_id(device: int) -> str:
    """What names a GPU on this host, whatever number it has in which process."""
    return visible_gpus()[device]
