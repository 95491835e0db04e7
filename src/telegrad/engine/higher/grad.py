"""`grad`, and what follows from it: gradients of chosen tensors, on whichever worker they are, of any order."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.registry import registry, within
from telegrad.engine.backward import as_roots, fetch_root
from telegrad.engine.higher.service import RecordingService
from telegrad.engine.service import PassService
from telegrad.errors import AutogradError
from telegrad.ids import ContextId, PassId, WorkerId
from telegrad.rpc.current import require_agent
from telegrad.rpc.functions import async_execution
from telegrad.rpc.futures import Future
from telegrad.rpc.options import UNSET_RPC_TIMEOUT, as_timeout
from telegrad.rref.rref import RRef, remote


def grad(
    context_id: int,
    outputs: Any,
    inputs: Any,
    grad_outputs: Sequence[Tensor | None] | Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> tuple[Any, ...]:
    """The gradients of the sum of `outputs` with respect to `inputs`, on all workers that took part in the context.

    Args:
        context_id: what `with autograd.context() as context_id` gave.
        outputs: tensors of one element, or with `grad_outputs` of any shape; or references to such tensors; or one.
        inputs: tensors of this worker (leaves, results, what was received), or references to tensors of any worker; or
            one.
        grad_outputs: the gradient to start from, for each output; None for an output of one element.
        retain_graph: keep the graph for another pass; by default if there is a `create_graph`.
        create_graph: record the pass itself, so that the gradients can be differentiated.
        allow_unused: give None for an input that the outputs do not depend on; otherwise that is an error.
        timeout: seconds until the pass is given up everywhere; by default the `rpc_timeout`; 0 for no limit.

    Returns a gradient for each input; for a reference, a reference to the gradient, which stays with its owner and can
    be differentiated when it is used in the context. Nothing is added to the gradients of the context.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.pow, (x, 3)).sum()
        ...     (g,) = autograd.grad(context_id, [y], [x], create_graph=True)
        ...     (h,) = autograd.grad(context_id, [g.sum()], [x])
        >>> h
        tensor([ 6., 12.])
    """
    agent = require_agent()
    context = registry().find(context_id)
    context.check_usable()
    starts = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    roots = as_roots(context, _several("outputs", outputs), starts)
    inputs = _several("inputs", inputs)
    seconds = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else as_timeout(timeout)
    service = recording_service()
    pass_id = service.next_pass_id()
    asking = _Asking(service, context, pass_id, inputs, seconds)
    pass_ = service.open_recorded(
        context,
        pass_id,
        create_graph if retain_graph is None else retain_graph,
        seconds,
        create_graph,
        asking.counts,
    )
    pass_.begin(roots=roots)
    pass_.wait()
    results = asking.results(pass_.found)
    missing = [position for position, result in enumerate(results) if result is None]
    if missing and not allow_unused:
        raise AutogradError(
            f"inputs {missing} of grad: One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(results)


def _several(name: str, given: Any) -> Sequence[Any]:
    """A list, also of one tensor or reference, which is given by itself."""
    if isinstance(given, Tensor | RRef):
        return [given]
    if not isinstance(given, Sequence):
        raise TypeError(f"{name} must be a tensor, a reference, or a list of these, got {type(given).__name__}")
    return given


class _Asking:
    """The inputs of one `grad`: which are here, and what the owners of the others were asked.

    The owners are asked before the pass begins, and nobody waits for that: each is told by the pass itself of how many
    tensors it will be asked, and begins when it knows them all.
    """

    def __init__(
        self, service: RecordingService, context: Context, pass_id: PassId, inputs: Sequence[Any], seconds: float
    ) -> None:
        self._here: dict[int, Future[Tensor | None]] = {}
        self._there: dict[int, RRef[Any]] = {}
        self._inputs = inputs
        self.counts: dict[WorkerId, int] = {}
        local = {position: _local_tensor(position, value) for position, value in enumerate(inputs) if _is_here(value)}
        for position, value in enumerate(inputs):
            if position in local:
                owner = service.here
                self._here[position] = service.ask_of(context, pass_id, position, local[position])
            else:
                owner = WorkerId(value.owner().id)
                context.touch((owner,))  # it has a part in the context, and must hear of the end
                with within(None):
                    self._there[position] = remote(
                        value.owner(),
                        _gradient_of,
                        args=[context.context_id, pass_id, position, value],
                        timeout=seconds,
                    )
            self.counts[owner] = self.counts.get(owner, 0) + 1

    def results(self, found: set[int]) -> list[Any]:
        """The gradient of each input, or None. The pass has ended everywhere."""
        results: list[Any] = []
        for position, value in enumerate(self._inputs):
            if position in self._there:
                results.append(self._there[position] if position in found else None)
                continue
            gradient = self._here[position].wait()
            results.append(RRef(gradient) if gradient is not None and hasattr(value, "to_here") else gradient)
        return results


def _is_here(value: Any) -> bool:
    return not isinstance(value, RRef) or value.is_owner()


def _local_tensor(position: int, value: Any) -> Tensor:
    tensor = value.local_value() if isinstance(value, RRef) else value
    if not isinstance(tensor, Tensor):
        raise TypeError(f"input {position} of grad must be a tensor or a reference to one, got {type(tensor).__name__}")
    if not tensor.requires_grad:
        raise AutogradError(f"input {position} of grad: One of the differentiated Tensors does not require grad")
    return tensor


@async_execution
def _gradient_of(context_id: ContextId, pass_id: PassId, position: int, rref: RRef[Any]) -> Future[Tensor | None]:
    """On the owner of an input: a future of its gradient."""
    service = recording_service()
    context = service.registry.join(context_id)
    try:
        tensor = _local_tensor(position, rref)
    except Exception as error:
        service.cannot_ask_of(context, pass_id, error)
        raise
    return service.ask_of(context, pass_id, position, tensor)


def recording_service() -> RecordingService:
    """That of this process's agent."""
    return RecordingService.of(require_agent().layer(PassService))


def vjp(
    context_id: int, outputs: Any, inputs: Any, vectors: Sequence[Tensor | None] | Tensor, **options: Any
) -> tuple[Any, ...]:
    """The product of `vectors`, one for each output, with the Jacobian of `outputs` by `inputs`; None where it is zero
    because nothing depends on the input. `options` are those of `grad`.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.pow, (x, 2))
        ...     autograd.vjp(context_id, [y], [x], [torch.tensor([1.0, 10.0])])
        (tensor([ 2., 40.]),)
    """
    return grad(context_id, outputs, inputs, vectors, **{"allow_unused": True, **options})


def hvp(context_id: int, loss: Any, inputs: Any, vectors: Any, **options: Any) -> tuple[Any, ...]:
    """The product of the Hessian of `loss` by `inputs` with `vectors`, one for each input, of its shape.

    An input may be a reference, and so may its vector; the result for it is a reference, as with `grad`.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.pow, (x, 3)).sum()
        ...     autograd.hvp(context_id, y, [x], [torch.tensor([1.0, 10.0])])
        (tensor([  6., 120.]),)
    """
    inputs, vectors = _several("inputs", inputs), _several("vectors", vectors)
    if len(vectors) != len(inputs):
        raise ValueError(f"{len(vectors)} vectors were given for {len(inputs)} inputs")
    context = registry().find(context_id)
    first = grad(context_id, [loss], inputs, create_graph=True, allow_unused=True)
    used = [(gradient, vector) for gradient, vector in zip(first, vectors, strict=True) if gradient is not None]
    tensors = [fetch_root(context, gradient) for gradient, _ in used]
    pairs = [(tensor, vector) for tensor, (_, vector) in zip(tensors, used, strict=True) if tensor.requires_grad]
    if not pairs:  # the loss is linear in all of them
        return (None,) * len(inputs)
    starts = [fetch_root(context, vector) for _, vector in pairs]
    return grad(context_id, [tensor for tensor, _ in pairs], inputs, starts, **{"allow_unused": True, **options})
