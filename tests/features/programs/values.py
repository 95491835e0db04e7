"""What travels: dtypes, layouts, containers of tensors, modes, and what is refused."""

import collections
import dataclasses
import enum
import tempfile
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from telegrad import rpc
from telegrad.errors import SerializationError
from tests.features.table import add, program, program_with, refused
from tests.features.world import STATE, call, data, given, leaf, log, module, param

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def twice(x: Tensor) -> Tensor:
    return x * 2


def squared(x: Tensor) -> Tensor:
    return x * x


for _dtype in FLOATS:
    _short = str(_dtype).removeprefix("torch.")
    add(f"dtype_{_short}_there", partial(lambda dtype: call(squared, leaf(3, dtype=dtype)), _dtype))
    add(f"dtype_{_short}_back", partial(lambda dtype: call(twice, leaf(3, dtype=dtype)) * 3, _dtype))


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * param("w", 3)).to(dtype)


for _dtype in (torch.float16, torch.bfloat16, torch.float64):
    _short = str(_dtype).removeprefix("torch.")
    add(f"dtype_converted_to_{_short}", partial(lambda dtype: call(converted, leaf(3), dtype) * 2, _dtype))


def with_integers(x: Tensor, index: Tensor, mask: Tensor, count: int) -> Tensor:
    return x[index] * mask[:2].float() * count * param("w", 2)


@program
def integers_and_masks_beside() -> Any:
    return call(with_integers, leaf(3), torch.tensor([2, 0]), torch.tensor([True, False, True]), 3)


@program
def real_and_imaginary_parts() -> Any:
    return call(parts_of, leaf(3, dtype=torch.complex64))


def parts_of(x: Tensor) -> Tensor:
    return x.real * x.imag


# --- layouts ---


def sparse_product(sparse: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.mm(sparse, dense) * param("w", 2)


@program
def sparse_coo_sent() -> Any:
    matrix = given(torch.eye(3).to_sparse().requires_grad_())
    return call(sparse_product, matrix, leaf(3, 2))


@program
def sparse_csr_sent() -> Any:
    return call(sparse_product, torch.eye(3).to_sparse_csr(), leaf(3, 2))


def sparse_back(x: Tensor) -> Tensor:
    return (x * param("w", 3)).to_sparse()


@program
def sparse_coo_returned() -> Any:
    return call(sparse_back, leaf(3, 3)).to_dense() * 2


@program
def channels_last() -> Any:
    return call(convolved, leaf(1, 2, 4, 4).to(memory_format=torch.channels_last))


def convolved(x: Tensor) -> Tensor:
    assert x.is_contiguous(memory_format=torch.channels_last)
    return module("conv", partial(nn.Conv2d, 2, 2, 2))(x)


@program
def strided_slices() -> Any:
    return call(squared, leaf(6, 4)[::2, 1::2])


@program
def an_empty_tensor() -> Any:
    return call(squared, leaf(0, 3)), leaf(2)


@program
def a_scalar_tensor() -> Any:
    return call(squared, leaf())


@program
def a_large_tensor() -> Any:
    return call(squared, leaf(300, 300)) * 1e-3


@program
def a_large_leaf_and_a_small_one() -> Any:
    return call(scaled_by, leaf(200, 200), leaf(1))


def scaled_by(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale * param("w", 200)


# --- containers ---


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Batch:
    inputs: Tensor
    weights: dict[str, Tensor]
    note: str = "none"


class Bag:
    __slots__ = ("inside",)

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class Colour(enum.Enum):
    RED = 2.0


def of_list(xs: list[Tensor]) -> Tensor:
    return xs[0] * xs[1]


def of_dict(xs: dict[str, Any]) -> Tensor:
    return xs["a"] * xs["deep"]["b"][0]


def of_point(point: Point) -> Point:
    return Point(point.x * point.y, point.y)


def of_batch(batch: Batch) -> Batch:
    return Batch(batch.inputs * batch.weights["w"], {"w": batch.weights["w"] * param("p", 3)}, "done")


def of_bag(bag: Bag) -> Bag:
    return Bag(bag.inside * param("p", 3))


def of_enum(x: Tensor, colour: Colour) -> Tensor:
    return x * colour.value


def of_keywords(x: Tensor, *, scale: Tensor, power: int = 2) -> Tensor:
    return (x * scale) ** power


def of_varied(*xs: Tensor, **named: Tensor) -> Tensor:
    return sum(xs) * named["last"]


def of_counter(xs: Any) -> Any:
    return collections.OrderedDict((key, value * 2) for key, value in reversed(xs.items()))


@program
def a_list() -> Any:
    return call(of_list, [leaf(3), leaf(3)])


@program
def a_tuple_within_a_tuple() -> Any:
    return call(of_list, (leaf(3), leaf(3)))


@program
def dictionaries() -> Any:
    return call(of_dict, {"a": leaf(3), "deep": {"b": [leaf(3)]}})


@program
def a_named_tuple() -> Any:
    found = call(of_point, Point(leaf(3), leaf(3)))
    return found.x * found.y


@program
def a_dataclass() -> Any:
    found = call(of_batch, Batch(leaf(3), {"w": leaf(3)}))
    assert found.note == "done"
    return found.inputs * found.weights["w"]


@program
def an_object_with_slots() -> Any:
    return call(of_bag, Bag(leaf(3))).inside


@program
def an_enum() -> Any:
    return call(of_enum, leaf(3), Colour.RED)


@program
def keyword_arguments() -> Any:
    return call(of_keywords, leaf(3), scale=leaf(3), power=3)


@program
def any_number_of_arguments() -> Any:
    return call(of_varied, leaf(3), leaf(3), leaf(3), last=leaf(3))


@program
def an_ordered_dict() -> Any:
    found = call(of_counter, collections.OrderedDict(a=leaf(3), b=leaf(3)))
    return found["a"] * found["b"]


@program
def none_among_the_results() -> Any:
    first, nothing, second = call(with_none, leaf(3))
    assert nothing is None
    return first * second


def with_none(x: Tensor) -> Any:
    return x * 2, None, x * 3


@program
def one_result_twice() -> Any:
    first, second = call(same_twice, leaf(3))
    assert first is second
    return first * second


def same_twice(x: Tensor) -> Any:
    y = x * 2
    return y, y


@program
def an_argument_returned() -> Any:
    x = leaf(3)
    return call(itself, x) * x


def itself(x: Tensor) -> Tensor:
    return x


@program
def a_parameter_returned() -> Any:
    return call(its_parameter) * leaf(3)


def its_parameter() -> Tensor:
    return param("own", 3)


@program
def a_module_sent_by_value() -> Any:
    layer = module("sent", partial(nn.Linear, 3, 2))
    return call(through, layer, leaf(2, 3))


def through(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).tanh()


@program
def a_module_as_the_function() -> Any:
    return call(module("called", partial(nn.Linear, 3, 2)), leaf(2, 3))


@program
def a_reference() -> Any:
    x = leaf(3)
    if not STATE.distributed:
        return squared(x) * x
    return rpc.remote("worker1", squared, (x,)).to_here() * x


@program
def a_reference_passed_on() -> Any:
    x = leaf(3)
    if not STATE.distributed:
        return squared(squared(x))
    return rpc.rpc_sync("worker2", of_reference, (rpc.remote("worker1", squared, (x,)),))


def of_reference(ref: Any) -> Tensor:
    return squared(ref.to_here())


@program
def a_reference_proxy() -> Any:
    x = leaf(3)
    if not STATE.distributed:
        return squared(x).sin()
    return rpc.remote("worker1", squared, (x,)).rpc_sync().sin()


# --- modes ---


@program
def without_grad_here() -> Any:
    x = leaf(3)
    with torch.no_grad():
        frozen = call(squared, x)
    assert not frozen.requires_grad
    return frozen * x


@program
def without_grad_there() -> Any:
    return call(partly_frozen, leaf(3))


def partly_frozen(x: Tensor) -> Tensor:
    with torch.no_grad():
        frozen = x * param("w", 3)
    return frozen * x


@program
def inference_mode_there() -> Any:
    return call(partly_inferred, leaf(3))


def partly_inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = (param("w", 3) * 2).sum().item()
    return x * scale


@program
def detached_on_the_way() -> Any:
    x = leaf(3)
    return call(squared, x.detach()) * x + call(detaches, x)


def detaches(x: Tensor) -> Tensor:
    return x.detach() * x


@program
def set_grad_enabled_there() -> Any:
    return call(switched, leaf(3))


def switched(x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        y = x * 2
    with torch.enable_grad():
        return y * x * param("w", 3)


@program
def anomaly_mode() -> Any:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return call(squared, leaf(3))


@program
def default_dtype_there() -> Any:
    return call(in_double, leaf(3))


def in_double(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return x * torch.ones(3)
    finally:
        torch.set_default_dtype(torch.float32)


def multiplied(x: Tensor) -> Tensor:
    y = x @ param("w", 3, 3)
    log("dtype", str(y.dtype))
    return y.float()


@program
def autocast_there() -> Any:
    return call(under_autocast, leaf(3, 3))


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return multiplied(x)


@program_with(variants=("plain", "retained"))
def autocast_of_the_caller_on_request() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(rpc.with_autocast(multiplied) if STATE.distributed else multiplied, leaf(3, 3))


@program
def saved_tensor_hooks_there() -> Any:
    return call(saved_elsewhere, leaf(3))


def saved_elsewhere(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy):
        return (x * param("w", 3)).exp()


@program
def saved_on_cpu_there() -> Any:
    return call(saved_on_cpu, leaf(3))


def saved_on_cpu(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (x * param("w", 3)).exp()


# --- what is refused ---


@refused(SerializationError, "TextIOWrapper cannot be sent.*send its name, or what it contains")
def an_open_file() -> Any:
    with tempfile.TemporaryFile("w+") as file:
        return call(itself, file)


@refused(SerializationError, r"a scripted module cannot be sent: load it on the worker with torch\.jit\.load")
def a_scripted_module() -> Any:
    return call(through, torch.jit.script(nn.Linear(3, 2)), leaf(2, 3))


@refused(SerializationError, r"layout is torch\._mkldnn: convert it with to_dense")
def an_mkldnn_tensor() -> Any:
    return call(itself, data(3).to_mkldnn())


@refused(SerializationError, r"layout is torch\._mkldnn: convert it with to_dense")
def an_mkldnn_result() -> Any:
    return call(Tensor.to_mkldnn, leaf(3) * 1)


@refused(SerializationError, "generator cannot be sent.*send a list of what it yields")
def a_generator() -> Any:
    return call(itself, (n for n in range(3)))


@refused(SerializationError, "exists only inside a torch.func transform")
def a_call_inside_vmap() -> Any:
    return torch.func.vmap(partial(call, twice))(data(3, 2))


@refused(SerializationError, "exists only inside a torch.func transform")
def a_call_inside_grad() -> Any:
    return torch.func.grad(lambda x: call(twice, x).sum())(data(3))


@refused(SerializationError, "has a tangent of forward-mode AD, which would be lost")
def a_dual_tensor() -> Any:
    with torch.autograd.forward_ad.dual_level():
        return call(twice, torch.autograd.forward_ad.make_dual(data(3), torch.ones(3)))


@program
def a_call_beside_dual_tensors() -> Any:
    x = leaf(3)
    with torch.autograd.forward_ad.dual_level():
        return call(twice, x) * x


@refused(TypeError, r"autocast does not follow a coroutine")
def autocast_for_a_coroutine() -> Any:
    return call(rpc.with_autocast(a_coroutine), leaf(3))


async def a_coroutine(x: Tensor) -> Tensor:
    return x
