"""Stands in for `torch.distributed.autograd`: Telegrad's contexts, and torch's private views of them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function

from telegrad import engine
from telegrad.autograd import context, get_gradients
from telegrad.autograd.context import Context
from telegrad.autograd.registry import current, registry
from telegrad.errors import AutogradError, ContextNotFound
from telegrad.ids import ContextId, last_id_of
from telegrad.rpc.current import require_agent
from telegrad.rpc.remote_errors import raised_on

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether distributed autograd can be used; always true where Telegrad can be imported."""
    return True


def backward(context_id: int, roots: Sequence[Any], retain_graph: bool = False) -> None:
    """See `telegrad.autograd.backward`. What a user's backward function raises comes as a RuntimeError, as in torch,
    with the error itself as its cause."""
    if not isinstance(context_id, int):
        raise TypeError(f"incompatible function arguments: context_id must be an int, got {context_id!r}")
    for root in roots if isinstance(roots, Sequence) else ():
        if isinstance(root, Tensor) and root.requires_grad and root.is_leaf and root.numel() == 1:
            raise AutogradError(
                "a root does not have a valid gradient function: it is a leaf, and nothing was computed"
            )
    with record_function("torch::distributed::autograd::backward"):
        try:
            engine.backward(context_id, roots, retain_graph)
        except (RuntimeError, TypeError):
            raise
        except Exception as error:
            raise AutogradError(f"Error on Node {_where(error)}: {error}") from error


def _where(error: BaseException) -> int:
    """The id of the worker on which an error was raised."""
    there = raised_on(error)
    return require_agent().info.id if there is None else there


class DistAutogradContext:
    """A context as torch shows it: what was sent, what was received, and to whom it is known."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<DistAutogradContext of {self._context!r}>"

    def _context_id(self) -> int:
        return self._context.context_id

    def _send_functions(self) -> dict[int, Any]:
        """The Sends by message id; each has a `name()` and `next_functions`."""
        return {int(message_id): send for message_id, send in list(self._context.sends.items())}

    def _recv_functions(self) -> dict[int, Any]:
        """The autograd nodes behind received tensors, by message id."""
        return {int(recv.message_id): recv.node for recv in list(self._context.recvs.values())}

    def _known_worker_ids(self) -> set[int]:
        """The other workers that have a part in this context."""
        return {int(worker) for worker in self._context.participants} - {int(self._context.here)}


def _current_context() -> DistAutogradContext:
    """The context that the running code is in."""
    found = current.get()
    if found is None:
        raise ContextNotFound(
            "Trying to retrieve the current autograd context, but no autograd context is active here: "
            "there is no valid autograd context set; use `with dist_autograd.context() as context_id:`"
        )
    return DistAutogradContext(found)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """A context by its id."""
    return DistAutogradContext(registry().find(context_id))


def _is_valid_context(context_id: int) -> None:
    """Raise unless there is a context of this id here."""
    registry().find(context_id)


def _new_context() -> DistAutogradContext:
    """Begin a context without `with`; it ends with `_release_context`."""
    return _retrieve_context(context().__enter__())


def _release_context(context_id: int) -> None:
    """End a context here and on all workers that know it."""
    ending = registry().find(context_id)
    if current.get() is ending:
        current.set(None)
    registry().end_everywhere(ContextId(context_id))


def _get_max_id() -> int:
    """The largest id a context of this worker can have."""
    return last_id_of(registry().here)


def _init(worker_id: int) -> None:
    """Called before a worker starts. Nothing is left to do: the contexts of a worker begin and end with its agent."""


def _get_debug_info() -> dict[str, str]:
    """Contexts and running passes of this worker, counted. A context may stay a moment longer than its passes."""
    contexts = registry().contexts()
    passes = sum(context.latest is not None and not context.latest.finished for context in contexts)
    return {"num_current_backward_passes": str(passes), "num_autograd_contexts": str(len(contexts))}
