"""The two ends of a call in the autograd graph: a Send is the root of a local graph, a Recv the end of one.

A `SendNode` remembers where the gradients of the tensors that left must enter the local graph. A `RecvNode` is one
autograd node behind all the tensors that arrived in one message; when the engine runs it, their gradients leave at
once, while the rest of the graph still runs. Sender and receiver name the pair by one message id.

Neither owns the context or the pass. Where the gradients of a Recv go is known by the engine call that runs it, not by
the Recv: two calls may be in one graph at the same time, one of a pass that was given up and one of its successor.
`running_in` notes it in torch's own thread state, which the engine carries to whatever threads it uses, and to calls
that a hook makes within.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from telegrad.autograd.leaf_nodes import held_by_nobody, is_plain
from telegrad.errors import AutogradError, GradientMismatch
from telegrad.ids import MessageId, WorkerId

Gradients: TypeAlias = Sequence[Tensor | None]

_is_grad_enabled, _in_inference_mode = torch.is_grad_enabled, torch.is_inference_mode_enabled
_strided = torch.strided
_WrittenInPython = torch._C._FunctionBase  # an edge to such a node has to keep it alive
_is_nested, _is_leaf = attrgetter("is_nested"), attrgetter("is_leaf")
_PLAIN = {Tensor, Parameter}
_RESOLVED = {"edges", "metas"}


class TensorMeta(NamedTuple):
    """What a gradient must look like to belong to a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMeta":
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


# A nested tensor has no shape, and torch has no custom Function that returns one. Its gradient travels as that of the
# numbers it holds, one after the other.


def _numbers_of(nested: Tensor) -> Tensor:
    with torch.enable_grad():
        return nested.contiguous().values()


def _nested_again(numbers: Any, like: Any) -> Tensor:
    form = (like._nested_tensor_size(), like._nested_tensor_strides(), like._nested_tensor_storage_offsets())
    with torch.inference_mode(False), torch.enable_grad():
        return torch._nested_view_from_buffer(numbers, *form)


_meta: Callable[[Tensor], tuple[torch.Size, torch.dtype, torch.device]] = attrgetter("shape", "dtype", "device")


class SendNode:
    """Where the gradients of one message's tensors enter the graph of the worker that sent it."""

    __slots__ = ("__weakref__", "_tensors", "at_leaves", "edges", "message_id", "metas", "peer")
    edges: list[GradientEdge]  # they keep the nodes alive, as a graph in one process does, and what is hooked to them
    metas: list[tuple[torch.Size, torch.dtype, torch.device]]
    at_leaves: bool  # whether all its tensors are leaves: then its gradients enter no graph

    def __init__(self, message_id: MessageId, peer: WorkerId, tensors: Sequence[Tensor], later: bool = False) -> None:
        """`tensors` are those of the message that require grad, in its order. With `later` its maker will `resolve` it,
        when the message has left, and until then nothing is done about leaves."""
        self.message_id = message_id
        self.peer = peer
        self._tensors: Sequence[Tensor] | None = tensors
        # The node of any other tensor is taken now: an in-place operation may give it another, even before its caller
        # goes on, for the worker that is called may call back.
        self.at_leaves = all(map(_is_leaf, tensors))
        is_plain = self.at_leaves and _PLAIN.issuperset(map(type, tensors)) and not any(map(_is_nested, tensors))
        if not later or not is_plain:
            self.resolve()

    def resolve(self) -> None:
        """See where the gradients go."""
        tensors = self._tensors
        if tensors is None:
            return
        try:
            self.metas = [*map(_meta, tensors)]
        except RuntimeError:  # one is nested, and has no shape: its numbers are what travels
            tensors = [_numbers_of(tensor) if tensor.is_nested else tensor for tensor in tensors]
            self.metas = [*map(_meta, tensors)]
            self.at_leaves = False
        self.edges = [*map(edge_of, tensors)]
        self._tensors = None  # last: a thread that resolves it at the same time finds the same

    def __getattr__(self, name: str) -> Any:
        """For what is not there yet: a pass of another thread asks before the maker of this has come to it."""
        if name not in _RESOLVED:
            raise AttributeError(f"a SendNode has no {name!r}")
        self.resolve()  # unless another thread has, since it was not there
        return object.__getattribute__(self, name)

    def unobserved_leaves(self) -> Sequence[Tensor]:
        """Its leaves, if the engine is not needed to give them their gradients; else none. No other thread may use its
        edges meanwhile, which it lets go of for a moment."""
        edges = self.edges
        if not _is_grad_enabled() or _in_inference_mode() or not all(map(is_plain, edges)):
            return ()
        leaves = [edge.node.variable for edge in edges]  # type: ignore[attr-defined] # of a leaf
        if len({*map(id, leaves)}) < len(leaves):
            return ()
        self.edges = []
        unobserved = held_by_nobody(edges)
        self.edges = [*map(edge_of, leaves)]  # as long as the context lives: what is hooked to them later has to stay
        return leaves if unobserved else ()

    def check(self, gradients: Gradients) -> None:
        """Raise `GradientMismatch` unless there is one gradient or None for each tensor sent, each of its kind."""
        try:
            if [*map(_meta, gradients)] == self.metas:  # type: ignore[arg-type] # None raises
                return
        except (AttributeError, RuntimeError):  # one is None; or nested, and so does not fit
            pass
        self._check_each(gradients)

    def _check_each(self, gradients: Gradients) -> None:
        metas = self.metas
        if len(gradients) != len(metas):
            raise GradientMismatch(
                f"worker {self.peer} returned {len(gradients)} gradients for message {self.message_id}, which sent "
                f"{len(metas)} tensors that require grad; the gradients were not used"
            )
        for position, (gradient, meta) in enumerate(zip(gradients, metas, strict=True)):
            if gradient is not None and _meta(gradient) != meta:
                raise GradientMismatch(
                    f"worker {self.peer} returned a gradient of {TensorMeta.of(gradient)} for tensor {position} of "
                    f"message {self.message_id}, which is {TensorMeta(*meta)}; the gradients were not used"
                )

    def name(self) -> str:
        """What torch calls such a node."""
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """As on an autograd node: one entry for each tensor sent."""
        return tuple([(edge.node, edge.output_nr) for edge in self.edges])

    def __repr__(self) -> str:
        return f"<SendNode {self.message_id}: {len(self.edges)} tensors to worker {self.peer}>"


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the gradient of a tensor goes. The two common cases, as `get_gradient_edge` has them, without its switching
    of modes.

    The node of a leaf is kept together with one that leads to it. Were Python alone to hold it, torch 2.13 would need
    the interpreter to find it, with the leaf's lock held, in any thread that uses the leaf; and if another applies a
    Function to that leaf, with the interpreter held, they wait for each other for good."""
    node: Any = tensor.grad_fn
    if node is not None:
        if not isinstance(node, _WrittenInPython):
            return GradientEdge(node, tensor.output_nr)
    elif tensor.layout is _strided and _is_grad_enabled():
        view: Any = tensor.view_as(tensor).grad_fn
        if view is not None and (leaf := view.next_functions[0][0]) is not None:
            return GradientEdge(leaf, 0, view)
    return edge_of_any(tensor)


def edge_of_any(tensor: Tensor) -> GradientEdge:
    """The same of any tensor, also of one that is sparse or nested. A view of a view made under `no_grad` says that it
    requires grad, but leads nowhere: in one process its gradient is dropped, and so it is here; and so is that of a
    leaf that requires grad no more."""
    if not tensor.requires_grad:
        return get_gradient_edge(anchored(_Drop, tensor.detach()))
    if tensor.layout is not _strided or tensor.is_nested:  # torch asks a view of the tensor, and of these there is none
        with torch.enable_grad():
            owner: Any = tensor.clone().grad_fn
        behind, output_nr = owner.next_functions[0]
        return GradientEdge(behind, output_nr, ownership_token=owner)
    try:
        edge = get_gradient_edge(tensor)
    except AssertionError:
        return get_gradient_edge(anchored(_Drop, tensor.detach()))
    if tensor.grad_fn is not None:
        return edge
    with torch.inference_mode(False), torch.enable_grad():
        return edge._replace(ownership_token=tensor.view_as(tensor).grad_fn)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


# Takes the gradients of a Recv, known by its autograd node: one gradient or None for each tensor.
Taker: TypeAlias = Callable[[Node, Gradients], None]

TAKER = "telegrad.taker"
_has_state, _get_state = torch._C._is_key_in_tls, torch._C._get_obj_in_tls
set_state: Callable[[str, Any], None] = torch._C._stash_obj_in_tls


def _takes_no_reference() -> bool:
    """Whether this torch forgets to count the reference that it keeps and later drops; those before 2.13 may."""
    probe = object()
    before = sys.getrefcount(probe)
    set_state("telegrad.probe", probe)
    forgets = sys.getrefcount(probe) == before
    if forgets:
        _count_reference(probe)
    set_state("telegrad.probe", None)
    return forgets


_count_reference = ctypes.pythonapi.Py_IncRef
_count_reference.argtypes, _count_reference.restype = (ctypes.py_object,), None


def _set_counted(key: str, value: object) -> None:
    _count_reference(value)
    torch._C._stash_obj_in_tls(key, value)


if _takes_no_reference():
    set_state = _set_counted


def taker() -> Taker | None:
    """Who takes the gradients of Recvs in the engine call that this code runs in; None outside of any pass."""
    found: Taker | None = _get_state(TAKER) if _has_state(TAKER) else None
    return found


@contextlib.contextmanager
def running_in(new: Taker) -> Iterator[None]:
    """`with running_in(taker):` gives the Recvs that engine calls within reach to `taker`."""
    before = taker()
    set_state(TAKER, new)
    try:
        yield
    finally:
        set_state(TAKER, before)


class RecvNode(msgspec.Struct, eq=False, weakref=True):
    """The end of a worker's graph at one received message; the gradients that reach it belong to the sender."""

    message_id: MessageId
    peer: WorkerId
    node: Node
    count: int  # of its tensors

    def name(self) -> str:
        """What torch calls such a node; the autograd node itself has the same name."""
        return RECV_NAME + "Backward"

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """As on an autograd node: the anchor."""
        return ((ANCHOR.node, ANCHOR.output_nr),)

    def __repr__(self) -> str:
        return f"<RecvNode {self.message_id}: {self.count} tensors from worker {self.peer}>"


def attach_recv(tensors: Sequence[Tensor], message_id: MessageId, peer: WorkerId) -> tuple[list[Tensor], RecvNode]:
    """Put received tensors behind one Recv. Returns them, requiring grad and with their memory, and the Recv.

    `tensors` are those of the message that required grad where they came from, in its order, at least one. None of them
    may be part of a graph yet. The tensors returned may be changed in place, but views not.
    """
    if any(map(_is_nested, tensors)):
        return _attach_nested(tensors, message_id, peer)
    if _is_grad_enabled() and not _in_inference_mode():
        attached = _apply_recv(_anchor, message_id, peer, tensors)
    else:
        with torch.inference_mode(False), torch.enable_grad():
            attached = _apply_recv(_anchor, message_id, peer, tensors)
    return [*attached], RecvNode(message_id, peer, attached[0].grad_fn, len(tensors))


def _attach_nested(tensors: Sequence[Tensor], message_id: MessageId, peer: WorkerId) -> tuple[list[Tensor], RecvNode]:
    numbers = [tensor.values().detach() if tensor.is_nested else tensor for tensor in tensors]
    attached, recv = attach_recv(numbers, message_id, peer)
    pairs = zip(attached, tensors, strict=True)
    return [_nested_again(one, like) if like.is_nested else one for one, like in pairs], recv


def _forward(
    ctx: Any, anchor: Tensor, message_id: MessageId, peer: WorkerId, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    ctx.message_id, ctx.peer = message_id, peer
    ctx.set_materialize_grads(False)  # a tensor without a gradient costs no zeros, here or on the wire
    # The tensors come inside a sequence, so to torch they are fresh outputs: given as inputs they would become views of
    # themselves. Torch forbids changing in place a view that a Function returns, which is right for those that overlap
    # others of the message, and those alone are views: the gradients of the others would be wrong without a word.
    return tuple(tensors)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
    take: Taker | None = _get_state(TAKER) if _has_state(TAKER) else None
    if take is None:
        raise AutogradError(
            f"gradients reached tensors received from worker {ctx.peer} (message {ctx.message_id}), but no "
            "backward pass of their context is running; call telegrad.autograd.backward(context_id, roots) within it"
        )
    take(ctx, gradients)
    return None, None, None, None


# A name that torch's own tools and tests look for; a class statement could not spell it.
RECV_NAME = "torch::distributed::autograd::RecvRpc"
_RecvFunction: Any = type(
    RECV_NAME, (torch.autograd.Function,), {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
)
# Past the Python of `Function.apply`, which looks for functorch's wrappers: what comes from another worker has none.
# And past that of a node's `apply`, which looks for the form in which its class has a backward.
_apply_recv = super(torch.autograd.Function, _RecvFunction).apply
_RecvFunction._backward_cls.apply = _backward

# The engine runs only nodes on the way to a leaf, so each Recv leads to this one. No gradient ever reaches it. One
# serves all, for asking the engine for one edge costs less than asking for many; the edge keeps its node alive.
_anchor = torch.zeros((), requires_grad=True)
ANCHOR: GradientEdge = get_gradient_edge(_anchor)


def anchored(function: Any, *args: object) -> Tensor:
    """Apply a Function to the anchor and `args`, whatever the thread's grad mode. It becomes a node the engine runs."""
    with torch.inference_mode(False), torch.enable_grad():
        output: Tensor = function.apply(_anchor, *args)
    return output
