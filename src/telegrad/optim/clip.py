"""Clipping by the norm of all gradients, wherever they are: owners send norms, never gradients.

The norms of single gradients are put back into the order of the trainer's parameters before they are combined, so the
total is the one torch.nn.utils.clip_grad_norm_ finds in one process.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from telegrad.optim.gradients import check_context, context_gradients, gradient_norms
from telegrad.optim.rounds import ask_all
from telegrad.optim.shares import GroupShare, parameter_groups, split_by_owner

NumberedNorms = tuple[list[int], torch.Tensor]


def total_norm(parts: Iterable[NumberedNorms], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """The norm of all gradients seen as one vector."""
    numbered = sorted(
        ((index, norm) for indices, norms in parts for index, norm in zip(indices, norms.unbind(), strict=True)),
        key=lambda entry: entry[0],
    )
    if not numbered:
        return torch.tensor(0.0)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm for _, norm in numbered]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        bad = [index for index, norm in numbered if not torch.isfinite(norm)]
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite ({total.item()}), so "
            f"it cannot be clipped; nothing was changed. Parameters whose gradient is not finite: {bad}. "
            "To scale by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


def shrink_factor(total: torch.Tensor, max_norm: float) -> float:
    """What to multiply each gradient by. Exact as a float: it was rounded to the norm's dtype before."""
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))


def clip_grad_norm_(
    context_id: int,
    params_rref: Iterable[Any],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradients that `context_id` holds for these parameters, in place, and return their norm before.

    Two rounds to all owners: one for the norms, one to scale. `DistributedOptimizer.step(context_id, max_norm=...)`
    does the second together with the step.

    Examples:
        >>> layer = RemoteModule("worker1", torch.nn.Linear, args=(2, 1))
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, [layer(torch.ones(1, 2)).sum()])
        ...     clip_grad_norm_(context_id, layer.remote_parameters(), max_norm=1.0)
        tensor(1.7321)
    """
    check_context(context_id)
    groups, _ = parameter_groups(params_rref)
    shares = split_by_owner(groups)
    norm_type = float(norm_type)
    norms = ask_all("clip_grad_norm_", {owner: (_norms, context_id, mine, norm_type) for owner, mine in shares.items()})
    total = total_norm(norms.values(), norm_type, error_if_nonfinite)
    shrink = shrink_factor(total, float(max_norm))
    ask_all("clip_grad_norm_", {owner: (_scale, context_id, mine, shrink) for owner, mine in shares.items()})
    return total


def _norms(context_id: int, shares: Sequence[GroupShare], norm_type: float) -> NumberedNorms:
    """Runs on an owner."""
    held = _held_gradients(context_id, shares)
    return list(held), gradient_norms(list(held.values()), norm_type)


def _scale(context_id: int, shares: Sequence[GroupShare], shrink: float) -> None:
    """Runs on an owner."""
    for gradient in _held_gradients(context_id, shares).values():
        gradient.mul_(shrink)


def _held_gradients(context_id: int, shares: Sequence[GroupShare]) -> dict[int, torch.Tensor]:
    gradients = context_gradients(context_id)
    return {
        index: gradients[param]
        for share in shares
        for index, param in zip(share.indices, share.local_params(), strict=True)
        if param in gradients
    }
