"""Tensors of one message that share memory, and changes in place on either side."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.features.table import program, refused
from tests.features.world import call, data, leaf, log, param

IN_PLACE = "is a view and is being modified inplace"
CHANGED = "modified inplace|modified by an inplace operation"


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).sum() * (y * param("w", 1)).sum()


@program
def a_tensor_and_its_view() -> Any:
    x = leaf(4) * 1
    return call(product, x, x[:2])


@program
def a_tensor_and_its_reshaped_view() -> Any:
    x = leaf(2, 3) * 1
    return call(product, x, x.view(6))


@program
def two_views_that_overlap() -> Any:
    x = leaf(6) * 1
    return call(product, x[:4], x[2:])


@program
def two_views_that_do_not_overlap() -> Any:
    x = leaf(6) * 1
    return call(product, x[:3], x[3:])


@program
def columns_of_a_matrix() -> Any:
    x = leaf(3, 2) * 1
    return call(product, x[:, 0], x[:, 1])


@program
def a_leaf_and_its_view() -> Any:
    x = leaf(4)
    return call(product, x, x[1:3])


@program
def a_tensor_and_itself_detached() -> Any:
    x = leaf(4) * 1
    return call(product, x, x.detach())


@program
def one_tensor_twice() -> Any:
    x = leaf(4) * 1
    return call(product, x, x)


@program
def an_expanded_tensor() -> Any:
    return call(product, leaf(1, 3).expand(4, 3), leaf(1))


@program
def a_transposed_tensor() -> Any:
    return call(transposed_sum, leaf(2, 3).t())


def transposed_sum(x: Tensor) -> Tensor:
    return (x @ param("t", 2, 2)).sin()


@program
def a_conjugate_and_its_tensor() -> Any:
    x = leaf(3, dtype=torch.complex64) * 1
    return call(product, x, x.conj())


@program
def hooks_on_a_view_that_is_sent() -> Any:
    x = leaf(4) * 1
    view = x[:2]
    view.register_hook(lambda g: log("view", g))
    x.register_hook(lambda g: log("whole", g))
    return call(product, x, view)


def returns_view(x: Tensor) -> Any:
    y = x * param("w", 4)
    return y, y[1:]


@program
def a_view_returned_with_its_base() -> Any:
    y, z = call(returns_view, leaf(4))
    return y.sum() * z.sum()


def changes_view(x: Tensor, view: Tensor) -> Tensor:
    view.mul_(3)
    return (x * x).sum()


@refused(RuntimeError, IN_PLACE)
def a_received_view_changed_in_place() -> Any:
    x = leaf(4) * 1
    return call(changes_view, x, x[:2])


def changes_base(x: Tensor, view: Tensor) -> Tensor:
    x.mul_(3)
    return (view * view).sum()


@refused(RuntimeError, IN_PLACE)
def a_received_base_changed_in_place() -> Any:
    x = leaf(4) * 1
    return call(changes_base, x, x[:2])


@refused(RuntimeError, IN_PLACE)
def a_returned_view_changed_in_place() -> Any:
    y, z = call(returns_view, leaf(4))
    y.mul_(2)
    return z


def changes_detached(x: Tensor, plain: Tensor) -> Tensor:
    y = x * x
    plain.zero_()
    return y


@refused(RuntimeError, CHANGED)
def memory_of_a_saved_tensor_changed_through_an_alias() -> Any:
    x = leaf(4) * 1
    return call(changes_detached, x, x.detach()).sum()


def changes_plain(x: Tensor, view: Tensor) -> Tensor:
    view.mul_(3)
    return x * param("w", 4)


@program
def a_view_without_gradient_changed_in_place() -> Any:
    x = data(4)
    return call(changes_plain, x.clone(), x[:0]) + call(changes_aliased, 4)


def changes_aliased(size: int) -> Tensor:
    return data(size) * param("w", 4)


@program
def plain_aliases_changed_in_place() -> Any:
    x = data(4)
    return call(changes_plain, x, x[:2]) + leaf(4)


def changes_itself(x: Tensor) -> Tensor:
    x.mul_(2)
    x[0] = 7.0
    return x * param("w", 4)


@program
def a_received_tensor_changed_in_place() -> Any:
    return call(changes_itself, leaf(4) * 1)


@program
def a_returned_tensor_changed_in_place() -> Any:
    y = call(changes_itself, leaf(4) * 1)
    y.sin_()
    y.add_(leaf(4))
    return y


@program
def a_sent_tensor_changed_in_place_afterwards() -> Any:
    x = leaf(4) * 1
    y = call(changes_itself, x.clone())
    x.mul_(3)
    return y * x


def neighbours(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    y.add_(x)
    return x * y * param("w", 3)


@program
def neighbours_in_memory_changed_in_place() -> Any:
    whole = leaf(6) * 1
    return call(neighbours, whole[:3].clone(), whole[3:].clone())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def through_tied(x: Tensor) -> Tensor:
    from tests.features.world import module

    return module("tied", Tied)(x)


@program
def tied_parameters() -> Any:
    return call(through_tied, leaf(2, 3))


def with_weights(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (x @ first).tanh() @ second


@program
def one_weight_sent_twice() -> Any:
    weight = leaf(3, 3)
    return call(with_weights, leaf(2, 3), weight, weight)


@program
def a_weight_and_its_transpose() -> Any:
    weight = leaf(3, 3)
    return call(with_weights, leaf(2, 3), weight, weight.t())
