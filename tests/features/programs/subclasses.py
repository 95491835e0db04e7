"""Tensor subclasses: those that consist of other tensors, and those that are one."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from telegrad.errors import SerializationError
from tests.features.table import program, refused
from tests.features.world import call, call_on, data, given, keep, kept, leaf, param


class Labelled(Tensor):
    """A wrapper of the usual kind: autograd sits on it, the numbers in a tensor within."""

    inner: Tensor
    label: str

    @staticmethod
    def __new__(cls, inner: Tensor, label: str) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor, label: str) -> None:
        self.inner = inner
        self.label = label

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner"], self.label

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], label: str, size: Any, stride: Any) -> "Labelled":
        return Labelled(inner["inner"], label)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        labels = [each.label for each in args if isinstance(each, Labelled)]

        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Labelled) else value

        def wrap(value: Any) -> Any:
            return Labelled(value, labels[0] if labels else "new") if isinstance(value, Tensor) else value

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.label = x.label
        return x.inner.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Labelled(gradients[0], ctx.label)


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Labelled(x.clone(), "wrapped")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return gradients[0].inner if isinstance(gradients[0], Labelled) else gradients[0]


def unwrap(x: Tensor) -> Tensor:
    return Unwrap.apply(x)


def wrap(x: Tensor) -> Tensor:
    return Wrap.apply(x)


def wrapper_in(x: Any) -> Tensor:
    assert type(x) is Labelled and x.label == "wrapped" and x.requires_grad
    return unwrap(x * 2) * param("w", 3)


@program
def a_wrapper_sent() -> Any:
    return call(wrapper_in, wrap(leaf(2, 3)))


def wrapper_out(x: Tensor) -> Any:
    return wrap(x * param("w", 3))


@program
def a_wrapper_returned() -> Any:
    y = call(wrapper_out, leaf(2, 3))
    assert type(y) is Labelled and y.requires_grad
    return unwrap(y * y)


@program
def a_wrapper_there_and_back() -> Any:
    y = call(wrapper_through, wrap(leaf(2, 3)))
    return unwrap(y) ** 2


def wrapper_through(x: Any) -> Any:
    return call_on("worker2", wrapper_sin, x * 3)


def wrapper_sin(x: Any) -> Any:
    return x.sin()


@program
def a_wrapper_twice_in_a_message() -> Any:
    wrapped = wrap(leaf(2, 3))
    return call(both_wrapped, wrapped, [wrapped, wrapped * 2])


def both_wrapped(x: Any, others: list[Any]) -> Tensor:
    assert x is others[0]
    return unwrap(x) * unwrap(others[0]) + unwrap(others[1])


@program
def a_wrapper_without_gradient() -> Any:
    return call(plain_wrapper, Labelled(data(2, 3), "plain")) + leaf(2, 3)


def plain_wrapper(x: Any) -> Tensor:
    assert type(x) is Labelled and not x.requires_grad
    return x.inner * param("w", 3)


@program
def a_wrapper_kept_between_calls() -> Any:
    x = leaf(2, 3)
    call(keep_wrapped, wrap(x))
    return call(use_wrapped, x)


def keep_wrapped(x: Any) -> None:
    keep("wrapped", x * 2)


def use_wrapped(x: Tensor) -> Tensor:
    return unwrap(kept("wrapped")) * x


def jagged(*parts: Tensor) -> Any:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def jagged_in(x: Any) -> Tensor:
    assert x.layout is torch.jagged and x.requires_grad
    return x.sin().values() * param("w", 3)


@program
def jagged_sent() -> Any:
    return call(jagged_in, jagged(leaf(2, 3), leaf(4, 3)))


def jagged_out(x: Tensor) -> Any:
    return jagged(x * 2, x[:1] * param("w", 3))


@program
def jagged_returned() -> Any:
    return (call(jagged_out, leaf(2, 3)) ** 2).values()


@program
def jagged_there_and_back() -> Any:
    return call(jagged_through, jagged(leaf(2, 3), leaf(1, 3)) * 2).sin().values()


def jagged_through(x: Any) -> Any:
    return call_on("worker2", jagged_linear, x)


def jagged_linear(x: Any) -> Any:
    return torch.nn.functional.linear(x, param("linear", 3, 3))


@program
def jagged_with_lengths_kept() -> Any:
    whole = jagged(leaf(3, 2), leaf(2, 2))
    return call(jagged_mean, whole, whole * 2)


def jagged_mean(x: Any, y: Any) -> Tensor:
    """Two of one structure: torch adds them only if they are known to have it in common."""
    return (x + y).values().mean(0) * param("w", 2)


@program
def jagged_without_gradient() -> Any:
    return call(jagged_plain, jagged(data(2, 3), data(1, 3))) + leaf(3, 3)


def jagged_plain(x: Any) -> Tensor:
    return x.values() * param("w", 3)


@program
def strided_nested_sent() -> Any:
    nested = torch.nested.as_nested_tensor([leaf(2, 3), leaf(4, 3)])
    return call(nested_in, nested)


def nested_in(x: Any) -> Tensor:
    return torch.nested.to_padded_tensor(x * 2, 0.0) * param("w", 3)


@program
def strided_nested_returned() -> Any:
    return torch.nested.to_padded_tensor(call(nested_out, leaf(2, 3)), 1.0) ** 2


def nested_out(x: Tensor) -> Any:
    return torch.nested.as_nested_tensor([x * 2, x[:1] * param("w", 3)])


class Named(Tensor):
    """A subclass without tensors within; operations keep it."""


def named_in(x: Any) -> Tensor:
    assert type(x) is Named
    return x * 2 * param("w", 3)


@program
def a_subclass_without_parts() -> Any:
    return call(named_in, leaf(2, 3).as_subclass(Named)).as_subclass(Tensor) ** 2


@program
def a_subclass_leaf() -> Any:
    return call(named_in, given(data(2, 3).as_subclass(Named).requires_grad_())).as_subclass(Tensor)


class SelfPickled(Tensor):
    """It pickles itself, so nobody can say how its gradient comes back."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remade, (self.as_subclass(Tensor).detach(),)


def _remade(x: Tensor) -> Tensor:
    return x.as_subclass(SelfPickled)


@refused(SerializationError, "SelfPickled that requires grad cannot be sent within a context.*__tensor_flatten__")
def a_subclass_that_pickles_itself() -> Any:
    return call(named_in, leaf(2, 3).as_subclass(SelfPickled))


@program
def a_subclass_that_pickles_itself_without_gradient() -> Any:
    return call(self_pickled, data(2, 3).as_subclass(SelfPickled)) + leaf(2, 3)


def self_pickled(x: Any) -> Tensor:
    assert type(x) is SelfPickled
    return x.as_subclass(Tensor) * param("w", 3)


@refused(SerializationError, "MaskedTensor cannot be sent: send get_data")
def a_masked_tensor() -> Any:
    return call(named_in, torch.masked.masked_tensor(data(3), data(3) > 0))


@refused(
    SerializationError,
    "UninitializedParameter cannot be sent within a context: it has no shape yet.*run its module once",
)
def an_uninitialized_parameter() -> Any:
    return call(named_in, torch.nn.LazyLinear(3).weight)
