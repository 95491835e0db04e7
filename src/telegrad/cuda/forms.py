"""What a tensor on the GPU is besides its bytes, and tensors of a form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """What a tensor is besides its bytes; no strides if it is contiguous."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def empty(form: Form, device: torch.device) -> Tensor:
    """A tensor of this form, whose memory holds anything."""
    if form.strides:
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=device)
    return torch.empty(form.shape, dtype=form.dtype, device=device)
