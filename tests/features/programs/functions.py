"""Operations of torch as the function that is called, and inside one."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.features.table import add, program
from tests.features.world import call, data, leaf, param

UNARY: dict[str, Any] = {
    name: getattr(torch, name)
    for name in (
        *("abs", "acos", "asin", "asinh", "atan", "ceil", "clone", "cos", "cosh", "cumsum", "digamma", "erf", "erfc"),
        *("exp", "expm1", "floor", "frac", "lgamma", "log1p", "neg", "nan_to_num", "relu", "round", "sigmoid", "sign"),
        *("sin", "sinc", "sinh", "square", "tan", "tanh", "trunc", "tril", "triu", "fliplr", "logcumsumexp", "logit"),
    )
}
_WITH_DIM = {"cumsum", "logcumsumexp"}


def unary(name: str, x: Tensor) -> Tensor:
    argument = x.sigmoid() * param("scale", 3).sigmoid()
    return UNARY[name](argument, *((0,) if name in _WITH_DIM else ()))


for _name in UNARY:
    add(f"op_{_name}", lambda name=_name: call(unary, name, leaf(3, 3)))


def direct(function: Any, *args: Any, **kwargs: Any) -> Any:
    return call(function, *args, **kwargs)


# The operation itself is what is called: a builtin, by its name.
add("direct_add", lambda: direct(torch.add, leaf(3), leaf(3), alpha=2))
add("direct_sub", lambda: direct(torch.sub, leaf(3), leaf(3)))
add("direct_mul", lambda: direct(torch.mul, leaf(3), leaf(2, 3)))
add("direct_div", lambda: direct(torch.div, leaf(3), leaf(3)))
add("direct_pow", lambda: direct(torch.pow, leaf(3), 3))
add("direct_mm", lambda: direct(torch.mm, leaf(2, 3), leaf(3, 2)))
add("direct_bmm", lambda: direct(torch.bmm, leaf(2, 2, 3), leaf(2, 3, 2)))
add("direct_matmul", lambda: direct(torch.matmul, leaf(2, 2, 3), leaf(3)))
add("direct_addmm", lambda: direct(torch.addmm, leaf(2, 2), leaf(2, 3), leaf(3, 2)))
add("direct_einsum", lambda: direct(torch.einsum, "ij,jk->ik", leaf(2, 3), leaf(3, 2)))
add("direct_cat", lambda: direct(torch.cat, [leaf(2), leaf(3)]))
add("direct_stack", lambda: direct(torch.stack, [leaf(2), leaf(2)]))
add("direct_where", lambda: direct(torch.where, data(3) > 0, leaf(3), leaf(3)))
add("direct_lerp", lambda: direct(torch.lerp, leaf(3), leaf(3), 0.3))
add("direct_gather", lambda: direct(torch.gather, leaf(2, 3), 1, torch.tensor([[0, 2], [1, 1]])))
add("direct_index_select", lambda: direct(torch.index_select, leaf(3, 2), 0, torch.tensor([0, 2, 2])))
add("direct_masked_fill", lambda: direct(torch.masked_fill, leaf(3), data(3) > 0, 7.0))
add("direct_topk", lambda: direct(torch.topk, leaf(5), 2)[0])
add("direct_sort", lambda: direct(torch.sort, leaf(5))[0])
add("direct_unbind", lambda: direct(torch.unbind, leaf(3, 2))[1])
add("direct_split", lambda: direct(torch.split, leaf(5), [2, 3])[1])
add("direct_chunk", lambda: direct(torch.chunk, leaf(6), 2)[0])
add("direct_meshgrid", lambda: direct(torch.meshgrid, leaf(2), leaf(3), indexing="ij"))
add("direct_logsumexp", lambda: direct(torch.logsumexp, leaf(2, 3), 1))
add("direct_norm", lambda: direct(torch.linalg.norm, leaf(2, 3)))
add("direct_inv", lambda: direct(torch.linalg.inv, leaf(3, 3)))
add("direct_det", lambda: direct(torch.linalg.det, leaf(3, 3)))
add("direct_solve", lambda: direct(torch.linalg.solve, leaf(3, 3), leaf(3)))
add("direct_svdvals", lambda: direct(torch.linalg.svdvals, leaf(3, 2)))
add("direct_cholesky", lambda: direct(cholesky, leaf(3, 3)))
add("direct_fft", lambda: direct(torch.fft.rfft, leaf(8)).abs())
add("direct_kron", lambda: direct(torch.kron, leaf(2), leaf(3)))
add("direct_cdist", lambda: direct(torch.cdist, leaf(2, 3), leaf(4, 3)))
add("direct_roll", lambda: direct(torch.roll, leaf(5), 2))
add("direct_amax", lambda: direct(torch.amax, leaf(2, 3), 1))
add("direct_var", lambda: direct(torch.var, leaf(5)))
add("direct_prod", lambda: direct(torch.prod, leaf(4)))
add("direct_cross", lambda: direct(torch.linalg.cross, leaf(2, 3), leaf(2, 3)))
add("direct_tensordot", lambda: direct(torch.tensordot, leaf(2, 3), leaf(3, 2), dims=1))
add("direct_scatter_add", lambda: direct(torch.scatter_add, leaf(4), 0, torch.tensor([0, 0, 3]), leaf(3)))
add(
    "direct_grid_sample",
    lambda: direct(functional.grid_sample, leaf(1, 1, 3, 3), leaf(1, 2, 2, 2), align_corners=False),
)
add("direct_interpolate", lambda: direct(functional.interpolate, leaf(1, 1, 4), scale_factor=2))
add(
    "direct_attention",
    lambda: direct(functional.scaled_dot_product_attention, leaf(1, 2, 4), leaf(1, 2, 4), leaf(1, 2, 4)),
)
add("direct_normalize", lambda: direct(functional.normalize, leaf(2, 3)))
add("direct_method", lambda: direct(Tensor.sin, leaf(3)))
# An operator can be called, but not be an argument, as it is in the nested variant.
_NOT_NESTED = ("plain", "unused", "retained")
add("direct_operator", lambda: direct(torch.ops.aten.mul.Tensor, leaf(3), leaf(3)), variants=_NOT_NESTED)
add("direct_packet", lambda: direct(torch.ops.aten.sin, leaf(3)), variants=_NOT_NESTED)
add("direct_lambda", lambda: direct(lambda x: x * 3, leaf(3)))
add("direct_partial", lambda: direct(partial(torch.mul, leaf(3)), leaf(3)))
add("direct_closure", lambda: direct(closing_over(leaf(3)), leaf(3)))
add("direct_bound_method", lambda: direct(leaf(3).mul, leaf(3)))
add("direct_builtin_sum", lambda: direct(sum, [leaf(3), leaf(3)]))
add("direct_class_as_function", lambda: direct(Pair, leaf(3), leaf(3)).product())


def cholesky(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x @ x.t() + torch.eye(3) * 3)


def closing_over(weight: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        return x * weight

    return inner


class Pair:
    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first = first
        self.second = second

    def product(self) -> Tensor:
        return self.first * self.second


def indexed(x: Tensor) -> Tensor:
    x = x * param("w", 4)
    y = torch.zeros(6)
    y[1:5] = x
    y[torch.tensor([0, 5])] = x[:2] ** 2
    return y


@program
def op_indexed_assignment() -> Any:
    return call(indexed, leaf(4))


def in_place_chain(x: Tensor) -> Tensor:
    y = x * param("w", 4)
    y.mul_(2).add_(x).clamp_(-1, 1).sin_()
    return y


@program
def op_in_place_chain() -> Any:
    return call(in_place_chain, leaf(4))


def random_there(x: Tensor) -> Tensor:
    torch.manual_seed(11)
    return functional.dropout(x, 0.5) + x * torch.rand(4) + functional.gumbel_softmax(x * param("w", 4))


@program
def op_random_numbers() -> Any:
    return call(random_there, leaf(4))


def higher(x: Tensor) -> Tensor:
    y = (x * param("w", 3)).sin().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    return first


@program
def op_gradient_of_a_gradient_there() -> Any:
    return call(second_order, leaf(3))


def second_order(x: Tensor) -> Tensor:
    """The inner gradient is taken to a tensor of this worker's own."""
    inner = x * 1
    return higher(inner) * 2
