"""Reentrant activation checkpoints (`torch.utils.checkpoint` with `use_reentrant=True`) inside a pass.

Such a checkpoint runs its function again in the middle of a backward pass, and runs a backward of its own through what
comes of it. Torch knows nothing of contexts: that backward would write to `.grad`, and calls that the function makes
would come too late for the pass that is running. So within a pass the second run has a context of its own, a
distributed pass goes through it, and the gradients it leaves on the workers are added to those of the context around.

Outside of a pass torch's own code runs.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, detach_variable, set_device_states

from telegrad.autograd.context import Context
from telegrad.autograd.functions import taker
from telegrad.autograd.registry import Registry, registry, within
from telegrad.engine.backward import backward
from telegrad.ids import ContextId
from telegrad.rpc.calls import rpc_sync

_torchs_own = CheckpointFunction.backward


def install() -> None:
    """Let reentrant checkpoints take part in passes."""
    CheckpointFunction.backward = staticmethod(_backward)  # type: ignore[method-assign] # replaced on purpose


def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
    running = getattr(taker(), "__self__", None)  # the pass whose engine call this is
    context = getattr(running, "context", None)
    if context is None:
        return _torchs_own(ctx, *gradients)  # type: ignore[no-untyped-call] # torch's own, without types
    saved = iter(ctx.saved_tensors)
    places = set(ctx.tensor_indices)
    given = tuple([next(saved) if place in places else value for place, value in enumerate(ctx.inputs)])
    inputs = detach_variable(given)
    contexts = registry()
    own = contexts.open(context.strict)
    try:
        with within(own):
            outputs = _run_again(ctx, inputs)
        roots = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        if not roots:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        live = [(output, gradient) for output, gradient in roots if gradient is not None]
        if live:
            backward(own.context_id, [output for output, _ in live], grad_tensors=[gradient for _, gradient in live])
        found = [own.gradients.pop(each, None) if isinstance(each, Tensor) else None for each in inputs]
        _add_everywhere(contexts, own, context)
    finally:
        contexts.end_everywhere(own.context_id)
    return (None, None, *found)


def _run_again(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The function once more, with random numbers and autocast as they were."""
    preserve = ctx.preserve_rng_state
    devices = ctx.fwd_devices if preserve and ctx.had_device_in_fwd else []
    kind = ctx.device_type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices, enabled=preserve, device_type=kind))
        if preserve:
            torch.set_rng_state(ctx.fwd_cpu_state)
            if ctx.had_device_in_fwd:
                set_device_states(ctx.fwd_devices, ctx.fwd_device_states, device_type=kind)
        stack.enter_context(torch.enable_grad())
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.amp.autocast(device_type=kind, **ctx.device_autocast_kwargs))
        stack.enter_context(torch.amp.autocast("cpu", **ctx.cpu_autocast_kwargs))
        outputs = ctx.run_function(*inputs)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _add_everywhere(contexts: Registry, own: Context, around: Context) -> None:
    """Add the gradients that a pass over `own` has left, here and elsewhere, to those of the context around it."""
    around.accumulate(own.gradients)
    others = own.participants - {contexts.here}
    around.touch(others)
    with within(None):  # it is no call of the user's
        for worker in others:
            rpc_sync(worker, _add_here, (own.context_id, around.context_id))


def _add_here(own: int, around: int) -> None:
    contexts = registry()
    found = contexts.get(own)
    if found is not None and found.gradients:
        contexts.join(ContextId(around)).accumulate(found.gradients)
