"""What a program of the table is written with. It runs unchanged in one process and over workers.

A program is a function that makes leaves, calls functions and returns a tensor, whose sum is the loss:

    @program
    def a_linear_layer() -> Tensor:
        return call(through_linear, leaf(2, 3))

In one process `call` calls; over workers it is an `rpc_sync` to another process. `leaf` makes a leaf of the caller;
`param`, `module` and `log` keep something under a name where the code runs. After `backward` the gradients of all of
them, the buffers of modules and the logs must be the same. Names are unique within a program.
"""

import asyncio
import inspect
import itertools
import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from telegrad import autograd, rpc


class State:
    """What one process keeps of the program that runs."""

    def __init__(self) -> None:
        self.distributed = True  # a worker never runs the oracle
        self.variant = "plain"
        self.lock = threading.RLock()  # programs use threads
        self.clear()

    def clear(self) -> None:
        self.numbers = itertools.count()
        self.leaves: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self.logs: dict[str, list[Any]] = {}
        self.kept: dict[str, Any] = {}  # whatever else a program puts aside between two calls


STATE = State()
AT = "worker1"


def _filled(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def data(*shape: int, dtype: torch.dtype = torch.float32, name: str = "data") -> Tensor:
    """Numbers that are the same in every process."""
    return _filled(name, shape, dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, name: str = "") -> Tensor:
    """A leaf of the caller."""
    name = name or f"leaf{next(STATE.numbers)}"
    made = STATE.leaves[name] = _filled(name, shape, dtype).requires_grad_()
    return made


def given(tensor: Tensor, name: str = "") -> Tensor:
    """A leaf that the program made itself."""
    STATE.leaves[name or f"leaf{next(STATE.numbers)}"] = tensor
    return tensor


def param(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter where this code runs; the same one each time."""
    with STATE.lock:
        if name not in STATE.leaves:
            STATE.leaves[name] = nn.Parameter(_filled(name, shape, dtype))
        return STATE.leaves[name]


def module(name: str, make: Callable[[], nn.Module]) -> Any:
    """A module where this code runs, with the same parameters everywhere; the same one each time."""
    with STATE.lock:
        if name not in STATE.modules:
            made = STATE.modules[name] = make()
            for key, each in made.named_parameters():
                if not isinstance(each, nn.parameter.UninitializedTensorMixin):
                    with torch.no_grad():
                        each.copy_(_filled(f"{name}.{key}", tuple(each.shape), each.dtype) / 2)
        return STATE.modules[name]


def log(name: str, value: Any) -> None:
    """Note what a hook saw."""
    STATE.logs.setdefault(name, []).append(plain(value))


def keep(name: str, value: Any) -> Any:
    """Put something aside where this code runs."""
    STATE.kept[name] = value
    return value


def kept(name: str) -> Any:
    return STATE.kept[name]


def call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function on another worker; in one process, call it."""
    return call_on(AT, func, *args, **kwargs)


def call_on(worker: str, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same, on a worker of one's choice: calls within calls."""
    if not STATE.distributed:
        return _finished(func(*args, **kwargs))
    if STATE.variant == "nested" and worker == AT:
        return rpc.rpc_sync("worker3", relay, ("worker2", func, args, kwargs))
    if STATE.variant == "unused" and worker == AT:
        tensors = [a for a in args if isinstance(a, Tensor) and a.requires_grad and a.layout is torch.strided]
        rpc.rpc_sync(worker, echo, tuple(tensors))  # a result that nobody uses
        result = rpc.rpc_sync(worker, func, args, kwargs)
        if type(result) is Tensor:
            rpc.rpc_sync("worker2", echo, (result,))
        return result
    return rpc.rpc_sync(worker, func, args, kwargs)


def call_async(func: Callable[..., Any], *args: Any) -> Any:
    """A future of what `call` returns."""
    if STATE.distributed:
        return rpc.rpc_async(AT, func, args)
    future: Any = torch.futures.Future()
    future.set_result(_finished(func(*args)))
    return future


def relay(through: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Pass a call on, over one worker more, to where programs run."""
    if through == AT:
        return rpc.rpc_sync(AT, func, args, kwargs)
    return rpc.rpc_sync(through, relay, (AT, func, args, kwargs))


def echo(*tensors: Tensor) -> Any:
    return [tensor * 1 for tensor in tensors]


def _finished(result: Any) -> Any:
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result.wait() if isinstance(result, torch._C.Future) else result


def plain(value: Any) -> Any:
    """A value as it can be compared: tensors by kind and contents."""
    if isinstance(value, Tensor):
        value = value.detach()
        layout, dtype = str(value.layout), value.dtype
        if value.is_nested:
            return ("nested", [plain(part) for part in value.unbind()])
        if value.layout is not torch.strided:
            value = value.to_dense()
        if dtype.is_floating_point and dtype.itemsize < 4:
            value = value.float()
        return (layout, str(dtype), tuple(value.shape), value.resolve_conj().resolve_neg().tolist())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


Outcome = dict[str, dict[str, Any]]


def outcome(context_id: int | None) -> Outcome:
    """What is left in this process: gradients, buffers, logs."""
    leaves = dict(STATE.leaves)
    for name, each in STATE.modules.items():
        leaves |= {f"{name}.{key}": value for key, value in each.named_parameters()}
    gradients = {} if context_id is None else autograd.get_gradients(context_id)
    found = {name: each.grad if context_id is None else gradients.get(each) for name, each in leaves.items()}
    strays = [name for name, each in leaves.items() if context_id is not None and each.grad is not None]
    return {
        "gradients": {name: plain(gradient) for name, gradient in found.items()},
        "buffers": {f"{n}.{k}": plain(b) for n, m in STATE.modules.items() for k, b in m.named_buffers()},
        "logs": dict(STATE.logs),
        "strays": dict.fromkeys(strays, "has a .grad"),
    }


def begin(distributed: bool, variant: str = "plain") -> None:
    STATE.clear()
    STATE.distributed = distributed
    STATE.variant = variant
    torch.manual_seed(1)


def no_longer() -> None:
    STATE.clear()
