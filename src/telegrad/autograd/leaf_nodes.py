"""Leaves that nobody observes: to give one its gradient is all that torch's engine would do, and that call is the
dearest part of the end of a small pass.

What observes a leaf is hooked to its tensor, which shows it, or to its node, which does not. Of a node's hooks those of
Python are seen by adding one. Any other belongs to somebody who holds the node, as `DistributedDataParallel` does. So a
mark is put on the node, and if that is gone once we have let go of the node, nobody else had it.
"""

import weakref
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

_PLAIN = {Tensor, Parameter}
_strided = torch.strided
_profiler_enabled = torch._C._autograd._profiler_enabled


class _Mark:
    __slots__ = ("__weakref__",)


def is_plain(edge: GradientEdge) -> bool:
    """Whether an edge leads to a leaf that takes a contiguous gradient as it is, and hooks of Python are neither on its
    tensor nor on its node."""
    node: Any = edge.node
    leaf: Any = getattr(node, "variable", None)
    if (
        type(leaf) not in _PLAIN
        or leaf.layout is not _strided
        or not leaf.is_contiguous()
        or not leaf.requires_grad
        or leaf.grad_fn is not None
        or leaf._backward_hooks
        or leaf._post_accumulate_grad_hooks
    ):
        return False
    handles = node.register_hook(_no_hook), node.register_prehook(_no_hook)
    only_ours = all(len(handle.hooks_dict_ref()) == 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return only_ours


def _no_hook(*_: object) -> None:
    pass


def held_by_nobody(edges: list[GradientEdge]) -> bool:
    """Whether nobody else has these nodes. Lets go of them: the list is emptied, and was the last that held them."""
    marks = []
    while edges:
        mark = _Mark()
        metadata: Any = edges.pop().node.metadata  # a dict that lives as long as the node
        metadata[_Mark] = mark
        marks.append(weakref.ref(mark))
    del mark, metadata
    return all(gone() is None for gone in marks)


def are_taken_as_they_are(gradients: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
    """Whether plain leaves would take these, which are of their shapes and dtypes, without a change or a copy."""
    for gradient in gradients:
        if (
            gradient is None
            or gradient.layout is not _strided
            or gradient.requires_grad
            or not gradient.is_contiguous()
        ):
            return False
    if len(gradients) > 1:
        memory = {gradient.untyped_storage()._cdata for gradient in gradients}  # type: ignore[union-attr] # none is None
        if len(memory) < len(gradients):
            return False
    return not _profiler_enabled()
