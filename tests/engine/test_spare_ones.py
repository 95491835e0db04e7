"""The one that the next pass starts from: used once, by the thread that made it, for a loss of the same kind.

With stand-ins for the GPU; `tests/cuda/test_order.py` has it on a real one."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from telegrad.cuda import order
from telegrad.engine import spare_ones
from telegrad.engine.spare_ones import make_spare, one_like


class Loss:
    """A loss as `one_like` sees it."""

    layout = torch.strided

    def __init__(self, device: int = 0, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = ()) -> None:
        self.device, self.dtype, self.shape = device, dtype, shape

    def dim(self) -> int:
        return len(self.shape)

    def get_device(self) -> int:
        return self.device


class Gpu:
    """Makes ones, on the host, and notes where each was to be and on which stream."""

    def __init__(self) -> None:
        self.stream = 7
        self.made: list[tuple[Any, ...]] = []  # ahead
        self.launched = 0  # when a pass began
        self.fails = False
        self.captures = False

    def current_stream(self, device: int) -> int:
        return self.stream

    def ones(self, shape: tuple[()], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError
        self.made.append((str(device), dtype, self.stream))
        return torch.ones(shape, dtype=dtype)

    def ones_like(self, loss: Loss) -> Tensor:
        self.launched += 1
        return torch.ones(loss.shape, dtype=loss.dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    stand_in = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("_C", "device", "is_inference_mode_enabled", "strided")},
        ones=made.ones,
        ones_like=made.ones_like,
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: made.captures),
    )
    monkeypatch.setattr(spare_ones, "torch", stand_in)
    monkeypatch.setattr(spare_ones, "_local", spare_ones._Local())
    monkeypatch.setattr(order, "current_stream", made.current_stream)
    return made


def step(loss: Loss) -> Tensor:
    """What a pass does: it starts from a one, and when that has left, leaves another."""
    one = one_like(loss)
    make_spare()
    return one


def test_each_pass_uses_what_the_one_before_has_left(gpu: Gpu) -> None:
    ones = [step(Loss()) for _ in range(4)]
    assert gpu.launched == 1 and gpu.made == [("cuda:0", torch.float32, 7)] * 4
    assert len({one.data_ptr() for one in ones}) == 4, "none is handed out twice"
    assert all(one.shape == () and one.item() == 1.0 and not one.requires_grad for one in ones)


def test_none_is_made_while_a_graph_is_captured(gpu: Gpu) -> None:
    """It would be written when the graph is replayed, and not before."""
    gpu.captures = True
    step(Loss())
    gpu.captures = False
    assert not gpu.made
    step(Loss())
    assert gpu.launched == 2 and len(gpu.made) == 1


def test_one_is_handed_out_once_also_if_none_follows(gpu: Gpu) -> None:
    step(Loss())
    first, second = one_like(Loss()), one_like(Loss())
    assert first is not second and gpu.launched == 2


@pytest.mark.parametrize("other", [Loss(1), Loss(0, torch.float64), Loss(0, shape=(1,)), Loss(0, shape=(1, 1))])
def test_a_loss_of_another_kind_has_its_own(gpu: Gpu, other: Loss) -> None:
    step(Loss())
    one = step(other)
    assert gpu.launched == 2 and one.dtype == other.dtype and one.shape == other.shape
    assert len(gpu.made) == (1 if other.shape else 2), "only for a loss without dimensions"


def test_another_stream_has_its_own(gpu: Gpu) -> None:
    step(Loss())
    gpu.stream = 8
    step(Loss())
    assert gpu.launched == 2
    one_like(Loss())
    gpu.stream = 9  # changed within the pass
    make_spare()
    assert [stream for *_, stream in gpu.made] == [7, 8]


def test_another_thread_has_its_own(gpu: Gpu) -> None:
    mine = [step(Loss()), None]
    thread = threading.Thread(target=lambda: mine.append(step(Loss())))
    thread.start()
    thread.join()
    assert gpu.launched == 2
    one_like(Loss())
    assert gpu.launched == 2, "and took nothing from this one"


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.inference_mode, _Functions, _Dispatch])
def test_where_somebody_would_notice_none_is_made_and_none_is_used(gpu: Gpu, mode: Callable[[], Any]) -> None:
    with mode():
        step(Loss())
    assert not gpu.made
    step(Loss())
    with mode():
        one_like(Loss())
    assert gpu.launched == 3 and len(gpu.made) == 1
    one_like(Loss())
    with mode():
        make_spare()  # the mode was entered within the pass
    assert len(gpu.made) == 1


def test_nor_within_transforms(gpu: Gpu) -> None:
    step(Loss())
    torch.func.vmap(lambda x: (step(Loss()), x)[1])(torch.ones(2))
    assert gpu.launched == 2 and len(gpu.made) == 1


def test_no_room_is_no_error(gpu: Gpu) -> None:
    gpu.fails = True
    step(Loss())
    gpu.fails = False
    assert step(Loss()).item() == 1.0 and gpu.launched == 2


def test_without_a_pass_there_is_none(gpu: Gpu) -> None:
    make_spare()
    step(Loss())
    make_spare()
    assert len(gpu.made) == 1
