"""One worker's part of a backward pass: runs what may run in torch's own engine, as the Sends are heard.

`regions.py` decides what runs now and in which way; this shell runs it. Equal to one process means: each node runs
once, with the sum of all that reaches it, and so does each hook.

- The last batch, usually the only one, is a plain `torch.autograd.backward`, with `.grad` of the leaves put aside.
- A closed batch before that asks `torch.autograd.grad` for the leaves; what it finds is kept for the last batch.
- A cut batch (`cut.py`) ends before the engine visits a node outside it. Post-hooks on the nodes that lead out collect
  what leaves; it enters as roots when its region runs. Not by asking the engine for those edges: it would run every
  node on the way to them, and a node visited without a gradient still fires its hooks.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from telegrad import trace
from telegrad.autograd.functions import ANCHOR, Gradients, RecvNode, running_in, taker
from telegrad.cuda import order
from telegrad.engine.cut import cut_before, empty_queue
from telegrad.engine.leaves import LeafSums, claimed, grads_aside, hooks_held, may_share, shared_held, variable_of
from telegrad.engine.regions import Batch, Edges, Plan, Way
from telegrad.errors import AutogradError, GradientMismatch

K = TypeVar("K", bound=Hashable)
Root = tuple[GradientEdge, Tensor | None]  # None: visited, but with no gradient

_NOTHING_BUT_RECVS = (ANCHOR,)
_LARGE = 64 * 1024  # bytes of a gradient that are worth more than the node that saves their copy


class LocalPass(Generic[K]):
    """A backward pass over the graph between one worker's Sends and its Recvs and leaves.

    `sends` are what may hear gradients, each with one edge for each of its tensors; a root of `backward` is one too,
    with a key of its own. `recvs` are where gradients leave: `deliver(key, gradients)` is called exactly once for each,
    with the gradients as soon as they exist, from inside the engine call, or with None as soon as it is known that none
    will come.

        pass_.start()              walk the graph; tells the Recvs that nothing reaches
        pass_.hear(key, gradients) once for each Send, from any thread, before or after `start`
        pass_.run()                run what may run, in this thread; call it after `start` and after each `hear`
        pass_.gradients            once `done`: the total for each leaf

    Only one thread runs at a time. `run` never waits for another: that one picks up what was heard meanwhile. It raises
    what a hook, a backward or `deliver` raised; the pass is over then. `deliver` must not wait for another pass: this
    one may hold leaves that the other needs.
    """

    def __init__(
        self,
        sends: Mapping[K, Sequence[GradientEdge]],
        recvs: Mapping[K, RecvNode],
        *,
        retain_graph: bool,
        deliver: Callable[[K, Gradients | None], None],
        lane: order.Lane | None = None,
    ) -> None:
        """With CUDA tensors `lane` has the streams that all calls of `run` are made on."""
        self.gradients: dict[Tensor, Tensor] = {}
        self.done = False
        self._sends = sends
        self._recvs = recvs
        self._retain_graph = retain_graph
        self._deliver = deliver
        self._lane = lane
        self._lock = threading.Lock()  # guards what follows, except what only the runner touches
        self._bits = {key: bit for bit, key in enumerate(sends)}
        self._unheard = dict.fromkeys(sends)
        self._untold = {recv.node: (key,) for key, recv in recvs.items()}  # boxed: a key may be None
        self._roots: list[Root] = []  # heard or collected, not yet entered
        self._some_dead = False  # whether a tensor of a Send was heard without a gradient
        self._plan: Plan[Node] | None = None
        self._running = False
        self._over = False
        # The runner's:
        self._graph: dict[Node, Edges[Node]] = {}
        self._leaves: dict[Node, Tensor] = {}
        self._sums = LeafSums()

    @property
    def waiting_for(self) -> tuple[K, ...]:
        """The Sends that have not been heard."""
        with self._lock:
            return tuple(self._unheard)

    def __repr__(self) -> str:
        state = "done" if self.done else "over" if self._over else "running" if self._running else "idle"
        waiting = ", ".join(map(repr, self._unheard))
        return f"<LocalPass {state}{f', waiting for {waiting}' if waiting else ''}>"

    @property
    def size(self) -> int:
        """How many nodes its graph has, once started."""
        return len(self._graph)

    @property
    def all_told(self) -> bool:
        """Whether every Recv has been told. The engine runs them last of all: they were the first to be made."""
        return not self._untold

    def start(self) -> None:
        """Walk the graph, and tell the Recvs that nothing reaches."""
        entries = [[edge.node for edge in edges] for edges in self._sends.values()]
        self._graph = graph = walk(entries)
        ends = [node for node, edges in graph.items() if not edges and node is not ANCHOR.node]
        self._leaves = {node: leaf for node in ends if (leaf := variable_of(node)) is not None}
        plan = Plan(graph, entries, self._untold)
        self._tell_none([node for node in self._untold if node not in graph])
        with self._lock:
            for key, bit in self._bits.items():
                if key not in self._unheard:
                    plan.heard(bit)
            self._plan = plan
            if self._over:  # given up meanwhile
                self._release()

    def hear(self, key: K, gradients: Gradients | None) -> None:
        """The Send `key` has its gradients, or none will come."""
        if key not in self._bits:
            raise AutogradError(
                f"{key!r} is not a send of this pass, which has {len(self._bits)}; no gradient was used"
            )
        with self._lock:
            if self._over:
                return
            if key not in self._unheard:
                raise AutogradError(f"{key!r} was heard twice in one pass; the second gradients were not used")
            edges = self._sends[key]
            if gradients is not None and len(gradients) != len(edges):
                raise GradientMismatch(f"{key!r} has {len(edges)} tensors, not {len(gradients)}; no gradient was used")
            del self._unheard[key]
            entering = [(edge, grad) for edge, grad in zip(edges, gradients or (), strict=False) if grad is not None]
            self._roots += entering
            self._some_dead |= len(entering) < len(edges)
            if self._plan is not None:
                self._plan.heard(self._bits[key])

    def run(self) -> None:
        """Run everything that may run. Returns at once if another thread is running: that one will run this, too."""
        with self._lock:
            if self._running or self._plan is None:
                return
            self._running = True
        try:
            while (taken := self._take()) is not None:
                batch, roots = taken
                since = 0.0 if trace.recorder is None else trace.now()
                recvs = list(self._untold) if batch.way is Way.LAST else batch.recvs
                if self._some_dead and recvs:  # a peer may be waiting to hear that nothing comes: before this runs
                    reached = walk([[edge.node for edge, _ in roots]])
                    self._tell_none([node for node in recvs if node not in reached])
                if batch.way is Way.LAST:
                    self._run_last(roots)
                elif batch.way is Way.CLOSED:
                    self._run_closed(batch.nodes, roots)
                else:
                    self._run_cut(batch.nodes, roots)
                if since and trace.recorder is not None:
                    trace.recorder.span(f"region ({batch.way.name.lower()})", "backward", since)
                self._tell_none(recvs)  # those that a node gave no gradient
                self.done = batch.way is Way.LAST
        except BaseException:
            empty_queue()
            with self._lock:
                self._over = True
                self._running = False
                self._release()
            raise

    def abort(self) -> None:
        """Give up and release everything. What is in the engine now still ends, but nothing is delivered any more."""
        with self._lock:
            self._over = True
            if not self._running:  # the runner still needs what it holds, and releases it when its call returns
                self._release()

    def _take(self) -> tuple[Batch[Node], list[Root]] | None:
        """The next batch and what enters it. With None this thread stops running: within the lock that `hear` takes, so
        that what is heard later finds nobody running."""
        with self._lock:
            batch = None if self._over or self._plan is None else self._plan.take()
            if batch is None:
                self._running = False
                if self._over or self.done:
                    self._release()
                return None
            entering, self._roots = self._roots, []
            if batch.way is not Way.LAST:
                inside = set(batch.nodes)
                self._roots = [root for root in entering if root[0].node not in inside]
                entering = [root for root in entering if root[0].node in inside]
            return batch, entering

    def _tell(self, node: Node, gradients: Gradients | None) -> None:
        """A Recv has its gradients: called by the Recv from inside the engine, on whichever thread that is. The engine
        call of a pass that was given up comes here, too, and what it found is dropped."""
        with self._lock:
            key = self._untold.pop(node, None)
            if self._over:
                return
        if key is None:
            raise self._unexpected(node)
        if gradients is not None and all(gradient is None for gradient in gradients):
            gradients = None
        self._deliver(key[0], gradients)

    def _unexpected(self, node: Any) -> AutogradError:
        what = f"gradients reached tensors received from worker {node.peer} (message {node.message_id})"
        if any(recv.node is node for recv in self._recvs.values()):
            return AutogradError(
                f"{what} twice in a backward pass; a hook or a custom backward must not run a backward of its own "
                "through received tensors"
            )
        return AutogradError(
            f"{what} after the backward pass that is running had begun, or in another context: a hook or a custom "
            "backward made the call, and a backward through it is no part of this pass. Open a context around both"
        )

    def _tell_none(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node in self._untold:
                self._tell(node, None)

    def _release(self) -> None:
        """Let go of the graph."""
        self._plan = None
        self._recvs, self._sends = {}, {}
        self._graph, self._leaves = {}, {}
        self._roots, self._sums = [], LeafSums()

    def _run_last(self, roots: list[Root]) -> None:
        """Everything left, leaves included. If another pass has some of the leaves, run the rest before waiting."""
        variables = list(self._leaves.values())
        if not variables:
            if roots:
                self._run_engine(roots, (), accumulate=True)
            return
        with claimed(variables, wait=False) as free:
            if free:
                self._run_with_leaves(roots, variables)
                return
        straight = [root for root in roots if root[0].node in self._leaves]
        self._run_closed(self._graph, [root for root in roots if root[0].node not in self._leaves])
        with claimed(variables):
            self._run_with_leaves(straight, variables)

    def _run_with_leaves(self, roots: list[Root], variables: list[Tensor]) -> None:
        self._hand_over_large(roots)
        if self._sums:
            roots = [*roots, (get_gradient_edge(self._sums.root()), torch.empty(0))]
        if not roots:
            return
        shared = may_share(self._graph, self._leaves) if len(variables) > 1 else ()
        with grads_aside(variables) as self.gradients, shared_held(shared) if shared else nullcontext():
            self._run_engine(roots, (), accumulate=True)

    def _hand_over_large(self, roots: list[Root]) -> None:
        """Turn large gradients that enter at a leaf into sums. A leaf copies what it is given unless nobody else holds
        it, and nobody holds a sum when it is handed on. `roots` itself is emptied of them, so that it holds none."""
        for position in range(len(roots) - 1, -1, -1):
            edge, gradient = roots[position]
            if gradient is None or edge.node not in self._leaves:
                continue
            if gradient.layout is torch.strided and gradient.nbytes >= _LARGE:
                del roots[position]
                self._sums.add(edge.node, gradient)

    def _run_closed(self, nodes: Iterable[Node], roots: list[Root]) -> None:
        """Nodes that lead to nothing but each other and leaves; what arrives at the leaves is added to their sums."""
        if not roots:
            return
        leaves = list({child: None for node in nodes for child, _ in self._graph[node] if child in self._leaves})
        found = self._ask(leaves, roots)
        visited: Mapping[Node, object] | None = None
        for leaf, part in zip(leaves, found, strict=True):
            if part is None and visited is None:
                visited = walk([[edge.node for edge, _ in roots]])
            if part is not None or (visited is not None and leaf in visited):
                self._sums.add(leaf, part)

    def _run_cut(self, nodes: list[Node], roots: list[Root]) -> None:
        """Nodes that lead to others that must wait; what leaves becomes roots of those, or is added to a leaf's sum."""
        if not roots:
            return
        inside = {*nodes, ANCHOR.node, None}
        beyond = {node: {child for child, _ in self._graph[node]} - inside for node in nodes}
        leaving = [node for node, children in beyond.items() if children]
        outside = {child for children in beyond.values() for child in children if child and child not in self._leaves}
        handles = [node.register_hook(partial(self._collect, node, inside)) for node in leaving]
        try:
            with claimed([*nodes, *outside]), cut_before(outside, nodes) as stop:
                self._ask(list(self._leaves), [*roots, (stop, torch.empty(0))])
        finally:
            for handle in handles:
                handle.remove()

    def _collect(self, node: Node, inside: set[Node | None], leaving: Gradients, _: object) -> None:
        """The post-hook of a node that leads out of a cut batch: keep what the engine will not take there."""
        if taker() != self._tell:
            return  # another engine call over the same graph: of another pass, or a user's own
        if self._lane is None:
            self._keep(node, inside, leaving)
        else:  # a node runs on the streams of its forward, and what leaves it is used on those of the pass
            order.hand_over(leaving, self._lane)
            with order.on(self._lane):
                self._keep(node, inside, leaving)

    def _keep(self, node: Node, inside: set[Node | None], leaving: Gradients) -> None:
        for (child, position), gradient in zip(self._graph[node], leaving, strict=True):
            if child is None or child in inside:
                continue
            if child in self._leaves:
                self._sums.add(child, gradient)
            else:
                with self._lock:
                    self._roots.append((GradientEdge(child, position), gradient))

    def _ask(self, leaves: Sequence[Node], roots: list[Root]) -> tuple[Tensor | None, ...]:
        """One engine call from `roots` that writes to no leaf and returns what arrived at each. Recvs run."""
        if not leaves:
            self._run_engine(roots, _NOTHING_BUT_RECVS, accumulate=False)
            return ()
        wanted = (*[GradientEdge(leaf, 0) for leaf in leaves], ANCHOR)
        first = {edge.node for edge, _ in roots}
        with hooks_held([self._leaves[leaf] for leaf in leaves], first):
            return self._run_engine(roots, wanted, accumulate=False)[:-1]

    def _run_engine(
        self, roots: list[Root], wanted: tuple[GradientEdge, ...], *, accumulate: bool
    ) -> tuple[Tensor | None, ...]:
        """One call of torch's engine. Not through `torch.autograd.backward` and `grad`: their checks of shapes and
        dtypes were made when the gradients came, and cost as much as a small graph takes to run."""
        engine = torch.autograd.Variable._execution_engine
        if all(gradient is not None for _, gradient in roots):
            edges = tuple([edge for edge, _ in roots])
            gradients = tuple([gradient for _, gradient in roots])
            with running_in(self._tell):
                return engine.run_backward(edges, gradients, self._retain_graph, False, wanted, True, accumulate)
        with _entering(roots) as (some_edges, some_gradients), running_in(self._tell):
            return engine.run_backward(
                tuple(some_edges), tuple(some_gradients), self._retain_graph, False, wanted, True, accumulate
            )


def walk(entries: Iterable[Iterable[Node]]) -> dict[Node, Edges[Node]]:
    """All nodes that the entries reach, each with its edges."""
    graph: dict[Node, Edges[Node]] = {}
    stack = [node for nodes in entries for node in nodes]
    while stack:
        node = stack.pop()
        if node not in graph:
            edges = graph[node] = node.next_functions
            for child, _ in edges:
                if child is not None and child not in graph:
                    stack.append(child)
    return graph


@contextmanager
def _entering(roots: Sequence[Root]) -> Iterator[tuple[list[GradientEdge], list[Tensor]]]:
    """The roots as an engine call takes them.

    It takes no root without a gradient, but where a node handed None across a cut, one process would visit the next
    node all the same. So a None enters as zeros, and a pre-hook of the node it enters at makes them None again, unless
    a gradient from elsewhere was added to them.
    """
    given = [(edge, gradient) for edge, gradient in roots if gradient is not None]
    edges = [edge for edge, _ in given]
    gradients = [gradient for _, gradient in given]
    handles = []
    for edge, gradient in roots if len(given) < len(roots) else ():
        if gradient is None and all(edge[:2] != other[:2] for other in edges):
            meta = edge.node._input_metadata[edge.output_nr]
            zeros = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
            handles.append(edge.node.register_prehook(partial(_empty_again, zeros)))
            edges.append(edge)
            gradients.append(zeros)
    try:
        yield edges, gradients
    finally:
        for handle in handles:
            handle.remove()


def _empty_again(zeros: Tensor, gradients: Gradients) -> Gradients:
    return tuple([None if gradient is zeros else gradient for gradient in gradients])
