"""Decides which part of a worker's graph may run now. It runs nothing: it takes what was heard and returns batches.

A worker's graph hangs from its Sends (on the root: and the roots of `backward`). Each node is marked with the Sends
that reach it, as a bit mask. Nodes of one mask form a region: they become ready together, when the last of those Sends
has been heard. An edge leads from a region only to itself or to one with a larger mask, so what leads to a ready region
is ready.

    Sends     a       b            masks    {a}: f, g    {b}: h    {a, b}: k
              |       |
              f       h            heard a: f leads out to k, which is not ready. If g ends in a Recv, {a} runs at
             / \\     /            once, cut off before k; if not, it waits and runs together with {a, b}.
            g   \\   /
                  k                heard b: everything left runs.

A batch is a set of ready regions that runs as one, in one of three ways (`Way`). Leaves belong to no region: what
reaches them is summed, and their own nodes run once, in the last batch. The graph is any mapping from a node to its
edges in the form of torch's `next_functions`; a node without edges is a leaf.
"""

import enum
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)
N = TypeVar("N", bound=Hashable)
Edges: TypeAlias = Sequence[tuple[N | None, int]]
Part: TypeAlias = tuple[Mapping[N, None], Sequence[N]]  # what one Send reaches: nodes, and leaves


class Way(enum.Enum):
    """How a batch meets what it leads to."""

    LAST = "all is heard: everything left runs, leaves included"
    CLOSED = "all that it leads to is leaves"
    CUT = "it leads to nodes that must wait: they are not visited, and what would reach them is collected"


class Region(Generic[N]):
    """The nodes that one set of Sends reaches, and the regions before and after it."""

    __slots__ = ("after", "before", "mask", "nodes", "ran", "recvs", "unheard")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.unheard = mask.bit_count()
        self.ran = False
        self.nodes: list[N] = []
        self.recvs: list[N] = []
        self.before: set[int] = set()
        self.after: set[int] = set()


class Stage(msgspec.Struct, Generic[N], eq=False):
    """What may follow a cut batch, or an earlier stage, within one engine call: once these Sends, too, are heard."""

    sends: Collection[Hashable]
    nodes: Collection[N]
    recvs: Iterable[N]
    regions: Sequence[Region[N]]
    behind: int  # how many nodes have yet to run when it begins


class Batch(msgspec.Struct, Generic[N], eq=False):
    """What runs now, and which of its nodes may be Recvs. None: all that has not run."""

    way: Way
    nodes: Collection[N] = ()
    recvs: Iterable[N] | None = ()
    leaves: Sequence[N] | None = None  # that a closed batch leads to, if that is known
    stages: Sequence[Stage[N]] = ()  # what may follow a cut batch in the same call, in this order


def mark(graph: Mapping[N, Edges[N]], roots: Sequence[Iterable[N]]) -> dict[N, int]:
    """For each node, which of `roots` reach it: bit i for the i-th."""
    waits = dict.fromkeys(graph, 0)
    for edges in graph.values():
        for child, _ in edges:
            if child is not None:
                waits[child] += 1
    masks = dict.fromkeys(graph, 0)
    for bit, nodes in enumerate(roots):
        for node in nodes:
            masks[node] |= 1 << bit
    settled = [node for node, count in waits.items() if not count]
    for node in settled:  # grows: a node follows once all that lead to it have passed on their mask
        mask = masks[node]
        for child, _ in graph[node]:
            if child is not None:
                masks[child] |= mask
                if left := waits[child] - 1:
                    waits[child] = left
                else:
                    settled.append(child)
    return masks


class Apart(Generic[K, N]):
    """The plan of the usual case: no two Sends reach the same node, leaves aside. What is heard may run, alone."""

    __slots__ = ("_parts", "_ready")

    def __init__(self, parts: Mapping[K, Part[N]], heard: Iterable[K]) -> None:
        self._parts = parts
        self._ready = list(heard)

    def heard(self, key: K) -> None:
        """The Send `key` has its gradients, or will have none."""
        self._ready.append(key)

    def take(self) -> Batch[N] | None:
        """What may run before all has been heard."""
        ready = self._ready
        if not ready:
            return None
        nodes, leaves = self._parts[ready.pop()]
        while ready:
            more_nodes, more_leaves = self._parts[ready.pop()]
            nodes, leaves = {**nodes, **more_nodes}, [*leaves, *more_leaves]
        return Batch(Way.CLOSED, nodes, nodes, leaves) if nodes else None


class Plan(Generic[K, N]):
    """Which regions may run, as the Sends are heard: `heard` takes an event, `take` returns the next batch."""

    stages_from: int | None = None  # a cut is offered with stages if so many nodes lie behind it; None: never

    def __init__(self, graph: Mapping[N, Edges[N]], sends: Mapping[K, Iterable[N]], recvs: Iterable[N] = ()) -> None:
        """`sends` are the nodes that the gradients of each Send enter at; `recvs` the nodes whose gradients leave."""
        roots = list(sends.values())
        self._keys = list(sends)
        self._bit_of = {key: bit for bit, key in enumerate(sends)}
        self._unheard = (1 << len(roots)) - 1
        self._ended = False
        self._regions: dict[int, Region[N]] = {}
        self._of_bit: list[list[Region[N]]] = [[] for _ in roots]
        self._ready: list[Region[N]] = []  # ready, not run; few, for what is ready and waits is the exception
        if len(roots) > 1:  # one Send: its batch is the last one, and there is nothing to divide
            self._divide(graph, mark(graph, roots), recvs)

    def heard(self, key: K) -> None:
        """The Send `key` has its gradients, or will have none: `take` may have a batch now."""
        bit = self._bit_of[key]
        self._unheard &= ~(1 << bit)
        for region in self._of_bit[bit] if self._unheard else ():
            region.unheard -= 1
            if not region.unheard:
                self._ready.append(region)

    def take(self) -> Batch[N] | None:
        """The next batch; whoever takes it must run it before asking again. None: wait for more, or all has run."""
        if not self._unheard:
            if self._ended:
                return None
            self._ended = True
            return Batch(Way.LAST)
        way, chosen = self._choose() if self._ready else (Way.CUT, [])
        if not chosen:
            return None
        stages: Sequence[Stage[N]] = ()
        if way is Way.CUT and self.stages_from is not None and (stages := self._stages(self.stages_from)):
            chosen = self._ready  # what follows waits for all of it
        self._run(chosen)
        nodes = dict.fromkeys([node for region in chosen for node in region.nodes])
        return Batch(way, nodes, [node for region in chosen for node in region.recvs], stages=stages)

    def follow(self, stage: Stage[N]) -> None:
        """A stage of the batch that was taken last runs now: its Sends have been heard."""
        self._run(stage.regions)

    def _run(self, regions: Sequence[Region[N]]) -> None:
        for region in regions:
            region.ran = True
        self._ready = [region for region in self._ready if not region.ran]

    def _stages(self, fewest: int) -> list[Stage[N]]:
        """What waits, in the order in which it will run whatever is heard first, if there is one: the Sends that have
        not been heard lie one behind the other. A part without a Recv runs with what follows it, and what waits for the
        last Send is no stage: when that is heard, all is."""
        steps: dict[int, list[Region[N]]] = {}  # by the Sends they wait for
        for region in self._regions.values():
            if region.unheard:
                steps.setdefault(region.mask & self._unheard, []).append(region)
        behind = sum(len(region.nodes) for step in steps.values() for region in step)
        stages: list[Stage[N]] = []
        previous = heard = 0
        regions: list[Region[N]] = []
        *but_last, last = sorted(steps, key=int.bit_count)
        for mask in but_last:
            if behind < fewest:
                return stages
            if previous & ~mask:
                return []
            previous = mask
            regions += steps[mask]
            if any(region.recvs for region in steps[mask]):
                nodes = dict.fromkeys([node for region in regions for node in region.nodes])
                recvs = [node for region in regions for node in region.recvs]
                sends = [self._keys[bit] for bit in _bits(mask & ~heard)]
                stages.append(Stage(sends, nodes, recvs, regions, behind))
                behind -= len(nodes)
                heard, regions = mask, []
        return stages if not previous & ~last else []

    def _choose(self) -> tuple[Way, list[Region[N]]]:
        """What runs now: first what leads nowhere else, then what leads to a Recv that is ready, cut off from the rest.

        A Recv's peer may be waiting, perhaps in order to give the very gradient that is missing here. What leads to no
        such Recv waits, for a cut costs more.
        """
        free: list[Region[N]] = []
        seen: set[int] = set()
        for region in self._ready:
            if region.mask not in seen:
                group, closed = self._connected(region, seen)
                if closed:
                    free += group
        if free:
            return Way.CLOSED, free
        wanted: dict[int, Region[N]] = {}
        pending = [region for region in self._ready if region.recvs]
        while pending:
            region = pending.pop()
            if region.mask not in wanted:
                wanted[region.mask] = region
                pending += [before for before in map(self._regions.__getitem__, region.before) if not before.ran]
        return Way.CUT, list(wanted.values())

    def _connected(self, start: Region[N], seen: set[int]) -> tuple[list[Region[N]], bool]:
        """The ready regions that must run in one call with `start` if nothing is cut, and whether they can.

        They can if none leads to a region that is not ready. They are linked forwards and backwards: a node runs once,
        so all that leads to it must have run before it or run with it.
        """
        seen.add(start.mask)
        group = [start]
        closed = True
        for region in group:  # grows
            for mask in region.after | region.before:
                other = self._regions[mask]
                if other.unheard:
                    closed = False
                elif not other.ran and mask not in seen:
                    seen.add(mask)
                    group.append(other)
        return group, closed

    def _divide(self, graph: Mapping[N, Edges[N]], masks: Mapping[N, int], recvs: Iterable[N]) -> None:
        """Group the nodes by mask, and note which groups lead to which."""
        regions = self._regions
        for node, edges in graph.items():
            if not edges:
                continue
            mask = masks[node]
            region = regions.get(mask)
            if region is None:
                region = regions[mask] = Region(mask)
            region.nodes.append(node)
            for child, _ in edges:
                if child is not None and masks[child] != mask and graph[child]:
                    region.after.add(masks[child])
        for mask, region in regions.items():
            for later in region.after:
                regions[later].before.add(mask)
            for bit in _bits(mask):
                self._of_bit[bit].append(region)
        for node in recvs:
            if node in masks:
                regions[masks[node]].recvs.append(node)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (bit := mask.bit_length() - 1)
        mask ^= 1 << bit
