"""Gradients in a message: which of them there are, and the tensors that travel.

A message names a gradient or none for each tensor of a Send; only those that exist are in its table of tensors.
"""

from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.functions import Gradients
from telegrad.errors import AutogradError

_SMALL = 32 * 1024
_ONE = (True,)
_is_there = partial(is_not, None)  # with `map`, in C: a comparison by `==` asks the tensors
_detach: Any = Tensor.detach
_is_contiguous = Tensor.is_contiguous


def to_send(gradients: Gradients | None) -> tuple[tuple[bool, ...], list[Tensor]]:
    """Which gradients there are, and each as it is cheapest to send: a small one in the plainest form; a large expanded
    one stays expanded."""
    if gradients is None:
        return (), []
    if len(gradients) == 1 and (only := gradients[0]) is not None:
        tensor = only.detach()
        return _ONE, [tensor if tensor.is_contiguous() else _plainest(tensor)]
    present = (*map(_is_there, gradients),)
    tensors = [*map(_detach, gradients if all(present) else filter(_is_there, gradients))]
    if not all(map(_is_contiguous, tensors)):
        tensors = [*map(_plainest, tensors)]
    return present, tensors


def _plainest(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.strided and tensor.nbytes <= _SMALL:
        return tensor.contiguous()
    return tensor


def take_present(present: tuple[bool, ...], tensors: list[Tensor]) -> list[Tensor | None] | None:
    """The gradients that a message announces, taken out of the tensors that came; None if none will come."""
    if not present:
        return None
    count = sum(present)
    if count > len(tensors):
        raise AutogradError(
            f"{len(tensors)} gradients came with a message, but {count} were announced; they were not used"
        )
    arrived = tensors[:count]
    del tensors[:count]
    if count == len(present):
        return arrived  # type: ignore[return-value] # a list of its own, so that it may as well have held None
    left = iter(arrived)
    return [next(left) if there else None for there in present]
