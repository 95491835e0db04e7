"""Steps of optimizers that nobody observes.

torch wraps `step` of every optimizer for its hooks and profilers. Where there are none that does nothing, and takes
longer than the step of a small parameter. So it is left out there.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd import profiler
from torch.optim import optimizer as torch_optimizer

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=torch.optim.Optimizer)

_profiler_enabled = torch._C._autograd._profiler_enabled
_TORCHS: Any = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks or a profiler would notice a step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or _profiler_enabled()
        or profiler._is_profiler_enabled  # of all threads
    )


def _is_wrapped(optimizer_class: type) -> bool:
    """Whether the step of a class is torch's wrapper around another, and not a user's around that. The class of an
    object that hands on what it is asked has none."""
    return getattr(getattr(optimizer_class, "step", None), "__code__", None) is _TORCHS


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """`optimizer.step`, without torch's wrapper if it is that and nobody observes it."""
    if not _is_wrapped(type(optimizer)) or "step" in vars(optimizer) or is_observed(optimizer):
        return optimizer.step  # the wrapper, a scheduler's or the user's own
    return functools.partial(type(optimizer).step.__wrapped__, optimizer)  # type: ignore[attr-defined] # it wraps one


def unless_observed(step: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """For a `step` of our own: torch's wrapper, but only where somebody observes it."""
    observed: Any = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # Of a class that derives from this one torch wraps the step itself, and has told those who observe it.
        result: R = (observed if is_observed(self) and not _is_wrapped(type(self)) else step)(self, *args, **kwargs)
        return result

    wrapper.hooked = True  # type: ignore[attr-defined] # what torch looks for before it wraps
    return wrapper
