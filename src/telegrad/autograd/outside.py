"""Results that require grad, of calls made outside any context: a backward from them ends at this worker.

They require grad here as in torch, for a program may use them as leaves of its own. But who expects a gradient at the
owner gets none, so each place that makes such a call is told once.
"""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from telegrad.errors import GradientsEndHere

_REFERENCE = re.compile(r"\w*RRef\(.*\)(?= on worker)")  # with ids of its own: of one text Python warns once
_NOT_THE_USERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))  # a RemoteModule is called by torch
_elsewhere: dict[Any, Any] = {}  # what was said of replies that no code of the user's was waiting for


def leave_behind(what: Callable[[], str], tensors: list[Tensor]) -> list[Tensor]:
    """Tensors came with the reply of a call outside any context."""
    for tensor in tensors:
        # A parameter says by its type what it is: a copy of one.
        if tensor.requires_grad and type(tensor) is not Parameter:
            _warn(what())
            break
    return tensors


def without_grad(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of a call made under `no_grad`: none requires grad, as in one process."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def _warn(what: str) -> None:
    what = _REFERENCE.sub("a reference", what)
    text = (
        f"the result of {what} requires grad, but the call was made outside any autograd context: a backward from it "
        "ends here and leaves no gradient there. Make it within `with telegrad.autograd.context() as context_id:` and "
        "run telegrad.autograd.backward(context_id, [loss]); or call under torch.no_grad(), or return it detached"
    )
    warn_where_called(text, GradientsEndHere)


def warn_where_called(text: str, category: type[Warning]) -> None:
    """Warn, and name the line of the user's code that led here, past torch's frames and our own: once for each."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "threading":
        warnings.warn_explicit(text, category, "<a reply>", 0, "replies", _elsewhere)
        return
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    module = names.get("__name__", "<unknown>")
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
