"""Functions that workers run in tests with a GPU, and ways to look at what a connection did."""

from typing import Any

import torch
from torch import Tensor

from telegrad import rpc
from telegrad.rpc.current import require_agent
from telegrad.transport.device.channel import DeviceChannel

LONG = 300_000_000  # cycles, more than a tenth of a second: what does not wait for it comes too early
SIZE = 2**18  # elements of a tensor that is neither small nor large


def echo(value: Any) -> Any:
    return value


def device_of(value: Tensor) -> str:
    return str(value.device)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def slow(value: float) -> Tensor:
    """A tensor that is `value` only after a long kernel."""
    tensor = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    return tensor.add_(value)


def plus_one_slowly(x: Tensor) -> Tensor:
    torch.cuda._sleep(LONG)
    return x + 1


def channel_to(name: str) -> DeviceChannel:
    """The device memory of the connection this worker has dialled."""
    agent = require_agent()
    connection = agent.link(agent.find(name)).connection()
    assert connection.devices is not None, "no CUDA tensor came by"
    return connection.devices


def warm(name: str = "worker1") -> None:
    """Have both sides of a connection learn that device memory can be opened."""
    for _ in range(4):
        rpc.rpc_sync(name, echo, args=(torch.ones(4, device="cuda"),))
