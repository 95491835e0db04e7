"""Distributed autograd: contexts, and the gradients a backward pass leaves in them.

The names are those of `torch.distributed.autograd`. `backward` lives in the engine, the layer above, and is found here
lazily.
"""

import importlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from telegrad import trace
from telegrad.autograd.context import Context
from telegrad.autograd.registry import current, registry, within
from telegrad.cuda import lanes, order
from telegrad.errors import AutogradError
from telegrad.ids import ContextId

if TYPE_CHECKING:
    from telegrad.engine.backward import backward, backward_async
    from telegrad.engine.higher.grad import grad, hvp, vjp

__all__ = [
    "Context",
    "backward",
    "backward_async",
    "context",
    "get_gradients",
    "grad",
    "hvp",
    "inspect_context",
    "vjp",
]

_FROM_ABOVE = ("backward", "backward_async", "grad", "hvp", "vjp")


if not TYPE_CHECKING:  # to a checker every name would exist then

    def __getattr__(name: str) -> Any:
        if name in _FROM_ABOVE:
            found = globals()[name] = getattr(importlib.import_module("telegrad.engine"), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it


class context:  # noqa: N801 - the name torch's users write
    """`with context() as context_id:` records the calls made inside, for `backward(context_id, ...)`.

    A call outside any context records nothing, so the gradients of what it sends are lost without a word; usually
    because it is made in a thread that was started within the block, and such a thread begins outside of it. While a
    context with `strict` is open, sending a tensor that requires grad from this worker outside any context is an error.
    Under `torch.no_grad()` nothing is recorded either; that was asked for, and is no error.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.exp, (x * 0,)).sum()])
    """

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._context: Context | None = None

    def __enter__(self) -> int:
        if current.get() is not None:
            raise AutogradError(
                "Already have an autograd context id for this thread: contexts do not nest within one thread; "
                f"end context {current.get()} first"
            )
        self._registry = contexts = registry()
        self._since = 0.0 if trace.recorder is None else trace.now()
        self._context = context = contexts.open(self._strict)
        self._token = current.set(context)
        return context.context_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._context is not None
        current.reset(self._token)
        self._registry.end_everywhere(self._context.context_id)
        if self._since and trace.recorder is not None:
            trace.recorder.span("context", "context", self._since, context=self._context.context_id)


def get_gradients(context_id: int, worker: str | int | None = None) -> dict[Tensor, Tensor]:
    """Gradients that passes over a context have left on this worker, by the leaf they belong to.

    With `worker`, those of another worker: copies of its leaves, and of their gradients.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, (x * 3,))])
        ...     autograd.get_gradients(context_id)[x]
        tensor([3., 3.])
    """
    if worker is not None:
        rpc = importlib.import_module("telegrad.rpc")
        with within(None):  # a question about the context is no part of it
            return dict(rpc.rpc_sync(worker, _gradient_pairs, args=(ContextId(context_id),)))
    found = registry().find(context_id)
    if not found.usable:
        found.check_usable()
    if order.active:
        lanes.adopt(found.gradients.values())
    return dict(found.gradients)


def _gradient_pairs(context_id: int) -> list[tuple[Tensor, Tensor]]:
    return [(leaf.detach(), gradient.detach()) for leaf, gradient in registry().find(context_id).gradients.items()]


def inspect_context(context_id: int) -> dict[str, Any]:
    """What this worker knows of a context: sends, receives, participants, gradients, what a running pass waits for.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.exp, (x,))
        ...     len(autograd.inspect_context(context_id)["sends"])
        1
    """
    found = registry().find(context_id)
    return {
        "context_id": found.context_id,
        "sends": {i: send.peer for i, send in found.sends.items()},
        "receives": {recv.message_id: recv.peer for recv in list(found.recvs.values())},
        "participants": sorted(found.participants),
        "gradients": len(found.gradients),
        "waiting_for": found.waiting_for(),
        "failure": None if found.failure is None else str(found.failure),
    }
