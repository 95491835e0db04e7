"""Custom Functions, functional transforms, compiled code, and optimizers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.features.table import add, program
from tests.features.world import call, call_on, data, leaf, log, module, param


class Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


class Separate(Function):
    """With `setup_context`."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale, None


class Two(Function):
    """Two outputs, of which one may go unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2 + grads[1] * 3


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        log("given", [grad is not None for grad in grads])
        return sum(grad * factor for grad, factor in zip(grads, (2, 3), strict=True) if grad is not None)


class Marked(Function):
    """Marks an output as not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        rest = x > 0
        ctx.mark_non_differentiable(rest)
        return x.sin(), rest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 5


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 4

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 4


class Silent(Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


class Straight(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


SHOWN = {
    "cube": Cube.apply,
    "separate": lambda x: Separate.apply(x, 2.5),
    "two_outputs": lambda x: sum(Two.apply(x)),
    "two_outputs_one_used": lambda x: Two.apply(x)[1],
    "unmaterialized": lambda x: Unmaterialized.apply(x)[0],
    "marked": lambda x: Marked.apply(x)[0],
    "dirty": lambda x: Dirty.apply(x * 1),
    "once_differentiable": Once.apply,
    "silent": lambda x: Silent.apply(x) + x,
    "silent_alone": Silent.apply,
    "straight_through": Straight.apply,
    "one_in_another": lambda x: Cube.apply(Separate.apply(x, 0.5)),
}


def custom_there(name: str, x: Tensor) -> Tensor:
    return SHOWN[name](x * param("w", 3))


for _name in SHOWN:
    add(f"custom_{_name}_there", partial(lambda name: call(custom_there, name, leaf(3)), _name))
    if _name != "unmaterialized":  # its log would be on both sides
        add(f"custom_{_name}_around", partial(lambda name: SHOWN[name](call(custom_there, name, leaf(3))), _name))


# --- functional transforms inside a called function ---


def per_sample(x: Tensor) -> Tensor:
    weight = param("w", 3)
    return torch.func.vmap(lambda row: (row * weight).sin().sum())(x)


def inner_grad(x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: (y**3).sum())(x) * param("w", 3)


def inner_jacobian(x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda y: y.sin() * param("w", 3))(x).sum(0)


def inner_hessian(x: Tensor) -> Tensor:
    return torch.func.hessian(lambda y: (y**3).sum())(x).diagonal()


def inner_vjp(x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(lambda y: y * y, x)
    return value + pull(torch.ones(3))[0]


def inner_jvp(x: Tensor) -> Tensor:
    return torch.func.jvp(lambda y: y * y, (x,), (torch.ones(3),))[1] * param("w", 3)


def stateless(x: Tensor) -> Tensor:
    layer = module("layer", partial(nn.Linear, 3, 2))
    scaled = {name: each * 2 for name, each in layer.named_parameters()}
    return torch.func.functional_call(layer, scaled, (x,))


def forward_mode(x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        return torch.autograd.forward_ad.unpack_dual(dual * dual * param("w", 3)).tangent


for _function in (per_sample, inner_grad, inner_jacobian, inner_hessian, inner_vjp, inner_jvp, stateless, forward_mode):
    _shape = (2, 3) if _function in (per_sample, stateless) else (3,)
    add(f"transform_{_function.__name__}", partial(lambda f, shape: call(f, leaf(*shape)), _function, _shape))


# --- compiled code ---


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return (x * param("w", 3)).sin()


@program
def compiled_function_by_name() -> Any:
    return call(compiled, leaf(3))


def sine(x: Tensor) -> Tensor:
    return x.sin() * 2


@program
def compiled_function_by_value() -> Any:
    return call(torch.compile(sine, backend="eager"), leaf(3))


@program
def compiled_module_by_value() -> Any:
    return call(torch.compile(module("layer", partial(nn.Linear, 3, 2)), backend="eager"), leaf(2, 3))


def compiled_inside(x: Tensor) -> Tensor:
    layer = torch.compile(module("layer", partial(nn.Linear, 3, 3)), backend="aot_eager")
    return layer(x) * 2


@program
def compiled_module_inside() -> Any:
    return call(compiled_inside, leaf(2, 3))


@torch.compile(backend="eager")
def compiled_caller(x: Tensor) -> Tensor:
    y = call(sine, x * 2)
    return y.cos() * x


@program
def compiled_code_that_calls() -> Any:
    return compiled_caller(leaf(3))


def compiled_and_calls(x: Tensor) -> Tensor:
    return torch.compile(lambda y: call_on("worker2", sine, y * 2).cos(), backend="eager")(x)


@program
def compiled_code_that_calls_there() -> Any:
    return call(compiled_and_calls, leaf(3))


# --- optimizers on either side ---


def trained_there(x: Tensor, kind: str) -> Tensor:
    """A few local steps inside a call, then a forward with what came of them."""
    layer = module("trained", partial(nn.Linear, 3, 2))
    optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(data(4, 3)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return layer(x)


for _kind in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad"):
    add(f"optimizer_{_kind.lower()}_inside_a_call", partial(lambda kind: call(trained_there, leaf(2, 3), kind), _kind))
