"""The local half of a backward pass: which Sends have been heard, and what may run now.

    pass_.start(sends, recvs)    walk the graph; tell the Recvs that nothing reaches; run what may run
    pass_.start_heard(...)       the same if a first Send has been heard, as it usually has: the short way
    pass_.hear(key, gradients)   once for each Send, from any thread, before or after `start`
    pass_.run()                  run what may run, in this thread; after each `hear`
    pass_.gradients              once `done`: the total for each leaf

When the last Send has been heard, everything left runs in one call of torch's engine: for a worker with one Send that
is all. Before that, what has been heard runs as far as it leads to no node that must wait: `regions.py` decides that,
`graph.py` runs it.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from operator import attrgetter, is_
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

from telegrad import trace
from telegrad.autograd.functions import Gradients, RecvNode, Taker
from telegrad.autograd.walking import Walked
from telegrad.cuda import order
from telegrad.engine.local.cut import empty_queue
from telegrad.engine.local.graph import Entered, Graph, reached_from
from telegrad.engine.local.hints import add_hint
from telegrad.engine.local.regions import Apart, Batch, Plan, Way
from telegrad.engine.local.stages import Root, may_come_late
from telegrad.errors import AutogradError, GradientMismatch
from telegrad.rpc.threads.wakeup import Wakeup

K = TypeVar("K", bound=Hashable)
Sends = Mapping[K, Entered]
Taken = tuple[Batch[Node], list[Root]]  # what this thread is to run, and what enters it

_LAST: Batch[Node] = Batch(Way.LAST, recvs=None)
_ALL_BUT_LEAVES: Batch[Node] = Batch(Way.CLOSED, recvs=None)
_NOTHING: dict[Any, Any] = {}  # never changed
_EMPTY: list[Any] = []  # nor is this
_is_none = partial(is_, None)  # with `map`, in C: a comparison by `==` asks the tensors
_enters_at_leaves = attrgetter("at_leaves")


class LocalPass(Generic[K]):
    """A backward pass over the graph between one worker's Sends and its Recvs and leaves.

    The Sends are what may hear gradients, each with one edge for each of its tensors; the roots of `backward` are one
    too, with a key of their own. The Recvs are where gradients leave: `deliver` is called exactly once for each, with
    the gradients as soon as they exist, from inside the engine call, or with None as soon as it is known that none will
    come.

    Only one thread runs at a time. `run` never waits for another: that one picks up what was heard meanwhile. It raises
    what a hook, a backward or `deliver` raised; the pass is over then. `deliver` must not wait for another pass: this
    one may hold leaves that the other needs.
    """

    # Defaults of the class: a small pass, heard and run at once, sets few of these.
    done = False  # all has run
    over = False  # given up: nothing is delivered any more
    gradients: Mapping[Tensor, Tensor] = {}
    _make_graph: Callable[[Sends[K], Taker, bool], Graph] = Graph.of_sends
    _graph: Graph | None = None  # from the start to the end; the runner's
    _plan: "Apart[K, Node] | Plan[K, Node] | None" = None  # only if something may run before all has been heard
    _early: tuple[tuple[K, Gradients | None], ...] = ()  # heard before the start
    _unheard: dict[K, Entered] = _NOTHING  # as all tables here: replaced when the pass starts
    _untold: dict[Node, RecvNode] = _NOTHING
    _roots: list[Root] = _EMPTY  # heard or collected, not yet entered
    _at_leaves: list[Root] = _EMPTY  # the same of Sends that enter at leaves alone: these wait for all others
    _running = False
    _inner_taken = False  # whether all that is above leaves has been taken to run
    _some_dead = False  # whether a tensor of a Send was heard without a gradient
    _more: Wakeup | None = None  # while a cut may go on: set when more is heard

    stages_from: int | None = 2000  # so many nodes behind a cut, and it may wait: with fewer no peer answers in time
    patience = 0.4e-6  # seconds that it may wait for each of them: what the engine takes to walk over one
    new_wakeup: Callable[[], Wakeup] = Wakeup  # tests put in one that lets their world go on

    def __init__(self, retain_graph: bool) -> None:
        self.retain_graph = retain_graph
        self._lock = threading.Lock()  # guards all of this, except what only the runner touches

    def deliver(self, recv: RecvNode, gradients: Gradients | None) -> None:
        """A Recv has its gradients, or None: none will come."""
        raise NotImplementedError

    @property
    def unheard(self) -> tuple[K, ...]:
        """The Sends that have not been heard."""
        with self._lock:
            return tuple(self._unheard)

    @property
    def size(self) -> int:
        """How many nodes its graph has, while it has one."""
        return 0 if self._graph is None else len(self._graph.edges)

    @property
    def all_told(self) -> bool:
        """Whether every Recv has been told. The engine runs them last of all: they were the first to be made."""
        return not self._untold

    def start_heard(
        self,
        key: K,
        gradients: list[Tensor | None] | None,
        sends: dict[K, Entered],
        recvs: dict[Node, RecvNode],
        walked: Walked | None = None,
    ) -> None:
        """The usual start: gradients for a first Send have come, and no other leads into a graph, since their tensors
        are leaves. So there is nothing to plan, and one call of the engine runs it. Takes over both tables, and what
        was `walked` over before."""
        first = sends.pop(key, None)
        if (
            first is None
            or gradients is None
            or any(map(_is_none, gradients))
            or not all(map(_enters_at_leaves, sends.values()))
        ):
            if first is not None:
                sends[key] = first
            self.hear(key, gradients)
            self.start(sends, recvs)
            return
        graph = Graph(first.edges, self._tell, self.retain_graph, walked)
        roots: list[Root] = [*zip(first.edges, gradients, strict=True)]
        gradients.clear()  # as in `_enter`
        self._untold = recvs
        if not recvs.keys() <= graph.edges.keys():
            self._tell_none([node for node in recvs if node not in graph.edges])
        taken: Taken | None = ((_ALL_BUT_LEAVES if sends else _LAST), roots)
        with self._lock:
            if self.over:
                return  # given up meanwhile
            self._graph, self._unheard = graph, sends
            self._running = self._inner_taken = True
            if sends or self._early:
                self._roots, self._at_leaves = [], []
                if self._early or graph.leaves:
                    self._roots, self._inner_taken = roots, False
                    taken = self._enter_early(graph)
        self._run(graph, taken)

    def start(self, sends: Sends[K], recvs: dict[Node, RecvNode]) -> None:
        """Walk the graph, tell the Recvs that nothing reaches, and run what may run. Takes over `recvs`."""
        graph = self._make_graph(sends, self._tell, self.retain_graph)
        self._untold = recvs
        if not recvs.keys() <= graph.edges.keys():
            self._tell_none([node for node in recvs if node not in graph.edges])
        with self._lock:
            if self.over:
                return
            self._graph, self._unheard, self._roots, self._at_leaves = graph, {**sends}, [], []
            taken = self._enter_early(graph)
        self._run(graph, taken)

    def _enter_early(self, graph: Graph) -> Taken | None:
        """Under the lock: with what was heard before the start, what may run first?"""
        for key, gradients in self._early:
            self._enter(key, gradients)
        self._early = ()
        return self._take(graph)

    def _make_plan(self, graph: Graph) -> "Apart[K, Node] | Plan[K, Node]":
        """Which part of the graph may run now: asked only while a Send has not been heard."""
        heard = [key for key in graph.inner if key not in self._unheard]
        if graph.parts is not None:
            return Apart(graph.parts, heard)
        entries = {key: [edge.node for edge in send.edges] for key, send in graph.inner.items()}
        plan = Plan(graph.edges, entries, self._untold)
        if graph.may_wait and not order.active:  # stand-ins know nothing of streams
            plan.stages_from = self.stages_from
        for key in heard:
            plan.heard(key)
        return plan

    def hear(self, key: K, gradients: Gradients | None) -> None:
        """The Send `key` has its gradients, or none will come."""
        with self._lock:
            if self._graph is not None:
                self._enter(key, gradients)
            elif not self.over and not self.done:
                self._early += ((key, gradients),)

    def _enter(self, key: K, gradients: Gradients | None) -> None:
        """Under the lock: what was heard becomes roots of the next engine call."""
        send = self._unheard.get(key)
        if send is None:
            self._refuse(key, gradients)
            return
        if gradients is None:
            self._some_dead = True
        else:
            try:
                entering = [*zip(send.edges, gradients, strict=True)]
            except ValueError:
                counts = f"{len(send.edges)} tensors, not {len(gradients)}"
                raise GradientMismatch(f"{key!r} has {counts}; no gradient was used") from None
            if any(map(_is_none, gradients)):
                self._some_dead = True
                entering = [root for root in entering if root[1] is not None]
            (self._at_leaves if send.at_leaves else self._roots).extend(entering)
            if type(gradients) is list:
                gradients.clear()  # the pass alone holds them now, so that a leaf can keep one without a copy
        del self._unheard[key]
        if self._more is not None:
            self._more.set()
        if self._plan is not None and not send.at_leaves:
            self._plan.heard(key)

    def _refuse(self, key: K, gradients: Gradients | None) -> None:
        """Gradients came for what is no Send of this pass, or has been heard."""
        raise AutogradError(f"{key!r} is not a send of this pass, or was heard before; the gradients were not used")

    def run(self) -> None:
        """Run everything that may run. Returns at once if another thread is running: that one will run this, too."""
        with self._lock:  # that `hear` takes, so that what is heard later finds this thread running, or nobody
            graph = self._graph
            if graph is None or self._running:
                return
            taken = self._take(graph)
        if taken is not None:
            self._run(graph, taken)

    def _run(self, graph: Graph, taken: Taken | None) -> None:
        """Run what this thread has taken, and whatever may run after it."""
        try:
            while taken is not None:
                batch, roots = taken
                since = 0.0 if trace.recorder is None else trace.now()
                if self._some_dead:  # a peer may be waiting to hear that nothing comes: before this runs
                    self._tell_unreached(batch, roots)
                if batch is _LAST:
                    graph.run_last(roots, self._at_leaves, self.wait_on)
                elif batch is _ALL_BUT_LEAVES:
                    graph.run_all_but_leaves(roots)
                else:
                    self._run_part(graph, batch, roots)
                if since and trace.recorder is not None:
                    trace.recorder.span(f"region ({batch.way.name.lower()})", "backward", since)
                if self._untold:  # those that a node gave no gradient
                    self._tell_none([*self._untold] if batch.recvs is None else batch.recvs)
                if batch is _LAST:
                    roots.clear()  # so that a gradient that only passed through is nobody's here any more
                    self._all_has_run(graph.gradients)
                    return
                with self._lock:
                    taken = self._take(graph)
        except BaseException as error:
            add_hint(error)
            empty_queue()
            with self._lock:
                self.over = True
                self._running = False
                self._release()
            raise

    def _run_part(self, graph: Graph, batch: Batch[Node], roots: list[Root]) -> None:
        """What need not wait for the Sends that have not been heard."""
        if batch.way is Way.CLOSED:
            graph.run_closed(batch.nodes, roots, batch.leaves)
        elif batch.stages:
            self._run_staged(graph, batch, roots)
        else:
            self._roots.extend(graph.run_cut(batch.nodes, roots, self.wait_on).left())

    def _take(self, graph: Graph) -> Taken | None:
        """Under the lock: the next batch and what enters it. With None this thread does not run, or runs no longer."""
        if self.over:
            self._release()
            batch = None
        elif not self._unheard:
            batch = _LAST
        elif self._inner_taken:
            batch = None
        elif graph.inner.keys().isdisjoint(self._unheard):  # they enter at leaves alone, which wait for all
            batch = _ALL_BUT_LEAVES
            self._inner_taken = True
        else:
            batch = self._take_planned(graph)
        if batch is None:
            self._running = False
            return None
        self._running = True
        roots, self._roots = self._roots, []
        if batch is not _LAST and (graph.leaves or batch is not _ALL_BUT_LEAVES):
            roots = self._entering(graph, batch, roots)
        return batch, roots

    def _entering(self, graph: Graph, batch: Batch[Node], roots: list[Root]) -> list[Root]:
        """What enters this batch; what enters elsewhere is kept."""
        nodes, inside = (graph.leaves, False) if batch is _ALL_BUT_LEAVES else (batch.nodes, True)
        entering = [root for root in roots if (root[0][0] in nodes) is inside]
        if len(entering) < len(roots):
            self._roots = [root for root in roots if (root[0][0] in nodes) is not inside]
        return entering

    def _take_planned(self, graph: Graph) -> Batch[Node] | None:
        """What need not wait for the Sends that have not been heard, and that lead into the graph."""
        if self._plan is None:
            if len(graph.inner) < 2:
                return None
            self._plan = self._make_plan(graph)
        return self._plan.take()

    # --- a cut that goes on when more is heard ---

    def _run_staged(self, graph: Graph, batch: Batch[Node], roots: list[Root]) -> None:
        """A cut, and the stages that follow it in the same engine call as far as their Sends are heard in time."""
        plan = self._plan
        assert type(plan) is Plan
        with self._lock:
            entries = [root[0] for root in self._roots]
            for key in graph.inner.keys() & self._unheard.keys():
                entries += graph.inner[key].edges
            self._more = self.new_wakeup()
        stages = batch.stages if all(map(may_come_late, entries)) else ()
        cut = graph.run_cut(batch.nodes, roots, self.wait_on, stages, entries, partial(self._go_on, batch))
        with self._lock:
            self._more = None
            self._roots.extend(cut.left())
            ran = batch.stages[: cut.reached]
            for stage in ran:
                plan.follow(stage)
            if len(ran) < len(batch.stages):
                plan.stages_from = None  # its peers are slow: waiting costs more than it spares
        if ran:
            batch.recvs = ran[-1].recvs  # those before it have been told

    def _go_on(self, batch: Batch[Node], number: int) -> list[Root] | None:
        """Inside the engine call of `batch`, when all before a stage of it has run: what enters that stage, once its
        Sends have been heard. None if they are not, in the time that the engine would take to walk over what is left:
        so waiting never costs more than twice what is best."""
        stage = batch.stages[number]
        recvs = batch.stages[number - 1].recvs if number else batch.recvs
        if self._untold and recvs is not None:
            self._tell_none(recvs)  # those that a node gave no gradient
        until = time.monotonic() + stage.behind * self.patience
        while not self.over:
            with self._lock:
                if not any(key in self._unheard for key in stage.sends):
                    entering = [root for root in self._roots if root[0][0] in stage.nodes]
                    self._roots = [root for root in self._roots if root[0][0] not in stage.nodes]
                    return entering
            left = until - time.monotonic()
            if left <= 0 or self._more is None or not self.wait_for_more(self._more, left):
                break
        return None

    def wait_for_more(self, more: Wakeup, seconds: float) -> bool:
        """Sleep until more is heard, or the pass is given up, or for so long. Whether it is worth another look."""
        more.wait(seconds)
        return True

    def wait_on(self, busy: str) -> None:
        """Another thread has leaves that this pass needs, and keeps them: whether to wait on. Raises if not."""
        if self.over:
            raise AutogradError(f"the backward pass was given up while {busy} worked on leaves that it needs")

    def _all_has_run(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """The last batch has run; perhaps the pass was given up meanwhile."""
        with self._lock:
            self._running = False
            self._release()
            if not self.over:
                self.gradients = gradients
                self.done = True

    def abort(self) -> None:
        """Give up and release everything. What is in the engine now still ends, but nothing is delivered any more."""
        with self._lock:
            self.over = True
            if self._more is not None:
                self._more.set()
            if not self._running:  # the runner still needs what it holds, and releases it when its call returns
                self._release()

    def _release(self) -> None:
        """Under the lock: let go of the graph and of every gradient on its way."""
        self._graph = self._plan = None
        self._early = ()
        self._unheard = self._untold = _NOTHING
        self._roots = self._at_leaves = _EMPTY

    def _tell(self, node: Node, gradients: Gradients | None) -> None:
        """A Recv has its gradients: called by the Recv from inside the engine, on whichever thread that is. The engine
        call of a pass that was given up comes here, too, and what it found is dropped."""
        recv = self._untold.pop(node, None)  # atomic
        if recv is None:
            if self.over:
                return
            raise self._unexpected(node)
        if not self.over:
            self.deliver(recv, None if gradients is None or all(map(_is_none, gradients)) else gradients)

    def _tell_unreached(self, batch: Batch[Node], roots: list[Root]) -> None:
        """The Recvs of a batch that no gradient will reach."""
        reached = reached_from(roots)
        recvs = self._untold if batch.recvs is None else batch.recvs
        self._tell_none([node for node in recvs if node not in reached])

    def _tell_none(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node in self._untold:
                self._tell(node, None)

    def _unexpected(self, node: Any) -> AutogradError:
        what = f"gradients reached tensors received from worker {node.peer} (message {node.message_id})"
        if self._graph is not None and node in self._graph.edges:
            return AutogradError(
                f"{what} twice in a backward pass; a hook or a custom backward must not run a backward of its own "
                "through received tensors"
            )
        return AutogradError(
            f"{what} after the backward pass that is running had begun, or in another context: a hook or a custom "
            "backward made the call, and a backward through it is no part of this pass. Open a context around both"
        )
