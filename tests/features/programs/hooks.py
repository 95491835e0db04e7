"""Hooks of all kinds, on either side. What they saw is compared, too."""

from typing import Any

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from tests.features.table import program, refused
from tests.features.world import STATE, call, keep, leaf, log, param


def once(name: str) -> bool:
    """Whether this is the first call of the program's function."""
    if name in STATE.kept:
        return False
    keep(name, True)
    return True


def multi_on_leaves(x: Tensor) -> Tensor:
    w, v = param("w", 2), param("v", 2)
    if once("registered"):
        register_multi_grad_hook((w, v), lambda grads: log("multi", list(grads)))
    return x * w + v


@program
def multi_grad_hook_on_leaves() -> Any:
    return call(multi_on_leaves, leaf(2))


@program
def multi_grad_hook_on_leaves_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_leaves, x) * call(multi_on_leaves, x * 2)


@program
def multi_grad_hook_on_leaves_of_nested_calls() -> Any:
    x = leaf(2)
    return call(multi_on_leaves, call(multi_on_leaves, x))


def multi_on_one_leaf(x: Tensor) -> Tensor:
    w = param("w", 2)
    if once("registered"):
        register_multi_grad_hook((w,), lambda grads: log("multi", list(grads)))
    return x * w


@program
def multi_grad_hook_on_one_leaf_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_one_leaf, x) + call(multi_on_one_leaf, x.sin())


def multi_on_inner(x: Tensor) -> Tensor:
    w = param("w", 2)
    y = x * w
    z = y.sin()
    register_multi_grad_hook((y, z), lambda grads: log("multi", list(grads)))
    return z * 2


@program
def multi_grad_hook_on_inner_tensors() -> Any:
    return call(multi_on_inner, leaf(2))


@program
def multi_grad_hook_on_inner_tensors_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_inner, x), call(multi_on_inner, x * 2)


def multi_on_both(x: Tensor) -> Tensor:
    w = param("w", 2)
    y = x * w
    register_multi_grad_hook((w, y), lambda grads: log("multi", list(grads)))
    return y * 2


@program
def multi_grad_hook_on_a_leaf_and_an_inner_tensor() -> Any:
    return call(multi_on_both, leaf(2))


@refused(RuntimeError, "This worker's part of the pass runs in several.*Register the hook on leaves alone")
def multi_grad_hook_on_a_leaf_and_an_inner_tensor_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_on_both, x), call(multi_on_both, x * 2)


def multi_any(x: Tensor) -> Tensor:
    w, v = param("w", 2), param("v", 2)
    if once("registered"):
        register_multi_grad_hook((w, v), lambda grad: log("any", "fired"), mode="any")
    return x * w + v


@program
def multi_grad_hook_of_any() -> Any:
    return call(multi_any, leaf(2))


@program
def multi_grad_hook_of_any_of_two_calls() -> Any:
    x = leaf(2)
    return call(multi_any, x) * call(multi_any, x)
