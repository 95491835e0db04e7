"""The one that a pass starts from, for a loss on a GPU: made ahead, while this worker waits for the others.

To launch the kernel that writes it takes 25 to 40 us, which everybody waits for at the start of a pass, and nobody once
the first gradients have left. So each pass leaves one for the next of its thread, which usually has a loss of the same
kind on the same stream. It is handed out once: leaves keep gradients, and hooks may change them.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from telegrad.cuda import order

_Kind = tuple[int, torch.dtype, int]  # its device, its dtype, the stream that writes it
_strided = torch.strided


class _Local(threading.local):
    wanted: _Kind | None = None  # what the pass that begins in this thread has started from
    spare: tuple[_Kind, Tensor] | None = None


_local = _Local()


def one_like(loss: Tensor) -> Tensor:
    """Ones for a loss of one element, on a GPU."""
    kind = _kind_of(loss)
    spare, _local.spare, _local.wanted = _local.spare, None, kind
    return torch.ones_like(loss) if spare is None or spare[0] != kind else spare[1]


def make_spare() -> None:
    """The first gradients of a pass have left: one for the next pass in this thread."""
    kind, _local.wanted = _local.wanted, None
    if kind is None or _is_watched():
        return
    device, dtype, stream = kind
    if order.current_stream(device) == stream:
        try:
            _local.spare = kind, torch.ones((), dtype=dtype, device=torch.device("cuda", device))
        except RuntimeError:  # no room, or the GPU has failed: who needs it will say so, this pass goes on
            return


def _kind_of(loss: Any) -> _Kind | None:
    """None if there is something about it that a plain one has not."""
    if loss.dim() or loss.layout is not _strided or _is_watched():
        return None
    device = loss.get_device()
    return device, loss.dtype, order.current_stream(device)


def _is_watched() -> bool:
    """Whether what is made here now is not what would be made elsewhere, or somebody sees it being made."""
    return (
        torch.is_inference_mode_enabled()
        or torch.cuda.is_current_stream_capturing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() > 0
    )
