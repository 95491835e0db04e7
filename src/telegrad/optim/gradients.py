"""The gradients a context left on this worker, for what runs next to the parameters."""

import torch

from telegrad import autograd
from telegrad.autograd.registry import registry
from telegrad.errors import ContextNotFound

Gradients = dict[torch.Tensor, torch.Tensor]


def check_context(context_id: int) -> None:
    """Refuse a context that the trainer does not know, or that has failed, before any owner is asked."""
    registry().find(context_id).check_usable()


def context_gradients(context_id: int) -> Gradients:
    """Each parameter's gradient; empty where the context never came by."""
    try:
        gradients: Gradients = autograd.get_gradients(context_id)
    except ContextNotFound:
        # The trainer has checked that the context exists, so this worker took no part in it.
        return {}
    return gradients


def gradient_norms(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of each gradient, as one vector in host memory."""
    if not gradients:
        return torch.empty(0)
    # A sparse gradient's norm is that of its values, once rows that occur twice are added up.
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return torch.stack([torch.linalg.vector_norm(gradient, norm_type).to("cpu") for gradient in dense])
