"""Tensor subclasses that consist of other tensors (`__tensor_flatten__`) travel as those, and autograd comes along.

Autograd sits on the outer tensor, and only inner ones travel. So taking it apart is a node of the sender's graph, and
putting it together one of the receiver's: a gradient of the outer tensor is taken apart where it leaves, and put
together where it arrives. What is between the two nodes are plain tensors, like any others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.errors import SerializationError

Sizes = tuple[int | None, ...]  # None for a size that only torch itself can name, as that of a jagged dimension
Rest = dict[str, Tensor]


def take_apart(tensor: Any) -> tuple[Any, ...]:
    """The arguments of `put_together`. Of a tensor that requires grad, the inner ones do, too."""
    cls = type(tensor)
    names, context = tensor.__tensor_flatten__()
    inner: Rest = {name: getattr(tensor, name) for name in names}
    form = (context, _sizes(tensor.shape), _sizes(tensor.stride()))
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return cls, inner, form, (), tensor.requires_grad
    carriers = _carriers(inner)
    if not carriers:
        raise SerializationError(
            f"a {cls.__qualname__} that requires grad cannot be sent: none of its inner tensors ({', '.join(names)}) "
            "could carry its gradient; send it detached"
        )
    outputs = _TakeApart.apply(tensor, cls, inner, form, carriers)  # type: ignore[no-untyped-call] # torch's own, without types
    return cls, {**inner, **dict(zip(carriers, outputs, strict=True))}, form, carriers, True


def put_together(cls: Any, inner: Rest, form: Any, carriers: Sequence[str], requires_grad: bool) -> Tensor:
    """The outer tensor again."""
    if not any(inner[name].grad_fn is not None for name in carriers):  # it came outside any context, and is a leaf
        made = _unflatten(cls, _detached(inner, carriers), form)
        return made.requires_grad_(requires_grad)
    with torch.enable_grad():
        outer: Tensor = _PutTogether.apply(cls, inner, form, carriers, *[inner[name] for name in carriers])  # type: ignore[no-untyped-call] # torch's own, without types
    return outer


def _sizes(sizes: Sequence[Any]) -> Sizes:
    return tuple([size if type(size) is int else None for size in sizes])


def _carriers(inner: Rest) -> tuple[str, ...]:
    """The inner tensors that may have a gradient. Empty ones only hold a number in their shape."""
    floating = [name for name, tensor in inner.items() if tensor.is_floating_point() or tensor.is_complex()]
    return tuple([name for name in floating if inner[name].numel()] or floating)


def _unflatten(cls: Any, inner: Rest, form: Any) -> Tensor:
    made: Tensor = cls.__tensor_unflatten__(inner, *form)
    return made.requires_grad_(False) if made.requires_grad else made


def _detached(inner: Rest, carriers: Sequence[str]) -> Rest:
    """Those that may require grad, detached. The others as they came: torch knows a jagged structure by its tensor."""
    return {name: tensor.detach() if name in carriers else tensor for name, tensor in inner.items()}


class _TakeApart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outer: Tensor, cls: Any, inner: Rest, form: Any, carriers: Sequence[str]
    ) -> tuple[Tensor, ...]:
        ctx.cls, ctx.form, ctx.carriers = cls, form, carriers
        ctx.rest = {name: tensor for name, tensor in inner.items() if name not in carriers}
        ctx.order = tuple(inner)
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in map(inner.__getitem__, carriers)]
        ctx.set_materialize_grads(False)
        return tuple([inner[name].detach() for name in carriers])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(gradient is None for gradient in gradients):
            return None, None, None, None, None
        found = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.like, strict=True)
        ]
        inner = {**ctx.rest, **dict(zip(ctx.carriers, found, strict=True))}
        outer = _unflatten(ctx.cls, {name: inner[name] for name in ctx.order}, ctx.form)
        return outer, None, None, None, None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cls: Any, inner: Rest, form: Any, carriers: Sequence[str], *carrying: Tensor) -> Tensor:
        ctx.cls, ctx.carriers = cls, carriers
        ctx.shapes = [tensor.shape for tensor in carrying]
        return _unflatten(cls, _detached(inner, carriers), form)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        if type(gradient) is ctx.cls:
            names, _ = gradient.__tensor_flatten__()
            parts = [getattr(gradient, name) if name in names else None for name in ctx.carriers]
        elif len(ctx.shapes) == 1 and gradient.shape == ctx.shapes[0]:
            parts = [gradient]
        else:
            raise SerializationError(
                f"the gradient of a received {ctx.cls.__qualname__} is a {type(gradient).__qualname__} of shape "
                f"{tuple(gradient.shape)}, which cannot be taken apart as it was; send the inner tensors themselves"
            )
        return None, None, None, None, *parts
