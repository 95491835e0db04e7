"""`backward`: the distributed pass, from the worker that starts it.

1. The roots are heard like a Send; the local graph runs; gradients leave as they come into being.
2. Participants that get no gradient from here are invited.
3. Each worker answers when it has heard all its Sends and run all its regions. When all have, it is done.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad import trace
from telegrad.autograd.context import Context
from telegrad.autograd.functions import edge_of
from telegrad.autograd.registry import within
from telegrad.cuda import order
from telegrad.engine.passes import Roots
from telegrad.engine.root_pass import RootPass
from telegrad.engine.service import PassService
from telegrad.engine.spare_ones import make_spare, one_like
from telegrad.errors import AutogradError
from telegrad.rpc.current import require_agent, running
from telegrad.rpc.futures import Future
from telegrad.rpc.layer import Layer
from telegrad.rpc.options import UNSET_RPC_TIMEOUT, as_timeout
from telegrad.rpc.remote_errors import hide_own_frames

_profiler_enabled = torch._C._autograd._profiler_enabled


class PassProfiler(Layer):
    """Who has the other workers profile their parts of a pass; a layer above derives this."""

    def profiling(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Around a pass that begins in a thread that is being profiled."""
        raise NotImplementedError


class RecordedPasses(Layer):
    """What `backward(create_graph=True)` asks of the layer that knows such passes; it derives from this."""

    def open_recording(self, context: Context, timeout: float) -> RootPass:
        """A new pass whose root is here and whose gradients have a graph."""
        raise NotImplementedError


def backward(
    context_id: int,
    roots: Sequence[Any],
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[Tensor | None] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    create_graph: bool = False,
) -> None:
    """Run the backward pass of a context from `roots`, on all workers that took part in it.

    Args:
        context_id: what `with autograd.context() as context_id` gave.
        roots: tensors of one element, or with `grad_tensors` of any shape; or references to such tensors.
        retain_graph: keep the graph for another pass.
        grad_tensors: the gradient to start from, for each root; None for a root of one element.
        timeout: seconds until the pass is given up everywhere; by default the `rpc_timeout`; 0 for no limit.
        create_graph: record the pass itself, so that its gradients can be differentiated; keeps the graph, too.

    The gradients of leaves are in `get_gradients(context_id)` on the worker where the leaf lives, never in `.grad`.
    An error on any worker ends the pass on all, and is raised here with that worker's name and traceback.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.pow, (x, 2))
        ...     autograd.backward(context_id, [y.sum()])
        ...     autograd.get_gradients(context_id)[x]
        tensor([2., 4.])
    """
    agent = running.agent or require_agent()
    since = 0.0 if trace.recorder is None else trace.now()
    service = agent.layer(PassService)
    context = service.registry.find(context_id)
    if not context.usable:
        context.check_usable()
    started = as_roots(context, roots, grad_tensors)
    seconds = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else as_timeout(timeout)
    if create_graph:
        pass_ = agent.layer(RecordedPasses).open_recording(context, seconds)
    else:
        pass_ = service.open(context, retain_graph, seconds)
    try:
        if _profiler_enabled():
            with agent.layer(PassProfiler).profiling(context):
                pass_.begin(roots=started)
                pass_.wait()
        else:
            pass_.begin(roots=started)
            if order.active:
                make_spare()
            pass_.wait()
    except Exception as error:
        hide_own_frames(error)
        raise
    if since and trace.recorder is not None:
        trace.recorder.span("backward", "backward", since, context=context_id)


def backward_async(
    context_id: int,
    roots: Sequence[Any],
    retain_graph: bool = False,
    *,
    grad_tensors: Sequence[Tensor | None] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    create_graph: bool = False,
) -> Future[None]:
    """Like `backward`, but returns a Future at once, which can be waited for or awaited.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.pow, (x, 2))
        ...     autograd.backward_async(context_id, [y.sum()]).wait()
        ...     autograd.get_gradients(context_id)[x]
        tensor([2., 4.])
    """
    future: Future[None] = Future(what=f"the backward pass of context {context_id}")

    def run() -> None:
        try:
            backward(
                context_id, roots, retain_graph, grad_tensors=grad_tensors, timeout=timeout, create_graph=create_graph
            )
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    require_agent().io_threads.submit(run)
    return future


def as_roots(context: Context, roots: Sequence[Any], grad_tensors: Sequence[Tensor | None] | None) -> Roots:
    """Where the pass starts, and from what."""
    if type(roots) is list and grad_tensors is None and len(roots) == 1:
        loss = roots[0]
        if type(loss) is Tensor and loss.requires_grad and loss.numel() == 1:  # as nearly always
            return Roots([edge_of(loss)], [one_like(loss) if loss.is_cuda else torch.ones_like(loss)])
    if type(roots) is not list and (isinstance(roots, Tensor) or not isinstance(roots, Sequence)):
        raise TypeError(
            "incompatible function arguments: roots must be a list of tensors or references, "
            f"got {type(roots).__name__}"
        )
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    if grad_tensors is not None and len(grad_tensors) != len(roots):
        raise ValueError(f"{len(grad_tensors)} grad_tensors were given for {len(roots)} roots")
    edges: list[GradientEdge] = []
    gradients: list[Tensor | None] = []
    for given in roots:
        root = given if isinstance(given, Tensor) else fetch_root(context, given)
        if not root.requires_grad:
            raise AutogradError(
                f"requires_grad not set on root {len(edges)}: it does not depend on anything that requires grad"
            )
        edges.append(edge_of(root))
        if grad_tensors is None and root.numel() == 1:
            gradients.append(torch.ones_like(root))
        else:
            position = len(gradients)
            gradients.append(_first_gradient(position, root, None if grad_tensors is None else grad_tensors[position]))
    return Roots(edges, gradients)


def fetch_root(context: Context, root: Any) -> Tensor:
    """A root itself, also of a reference to it."""
    if hasattr(root, "to_here"):
        # Fetched inside the context, so the value comes with a Recv that leads back to its owner.
        with within(context):
            root = root.to_here()
    if not isinstance(root, Tensor):
        raise TypeError(f"incompatible function arguments: a root must be a tensor, got {type(root).__name__}")
    return root


def _first_gradient(position: int, root: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        if root.numel() != 1:
            raise AutogradError(
                f"root {position}, of shape {tuple(root.shape)}, is not a scalar, all roots need to be scalar "
                "unless `grad_tensors` says what to start from"
            )
        return torch.ones_like(root, memory_format=torch.preserve_format)
    if gradient.shape != root.shape:
        raise ValueError(f"grad_tensors[{position}] has shape {tuple(gradient.shape)}, its root {tuple(root.shape)}")
    return gradient
