"""`Plan` on random graphs, against definitions spelled out by brute force. No torch, no processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from telegrad.engine.local.regions import Batch, Plan, Way, mark

Graph = dict[int, tuple[tuple[int | None, int], ...]]


@dataclass
class Program:
    graph: Graph
    roots: list[list[int]]
    recvs: list[int]
    order: list[int]

    def reached(self, starts: Iterable[int]) -> set[int]:
        found: set[int] = set()
        for start in starts:
            if start not in found:
                found |= {start} | self.reached(child for child, _ in self.graph[start] if child is not None)
        return found

    def sends_of(self, node: int) -> set[int]:
        return {bit for bit, nodes in enumerate(self.roots) if node in self.reached(nodes)}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Edges lead from small numbers to large ones; the last nodes are leaves, and some inner nodes are Recvs."""
    inner = draw(st.integers(1, 12))
    leaves = draw(st.integers(1, 3))
    graph: Graph = {}
    for node in range(inner):
        children = draw(
            st.lists(st.one_of(st.none(), st.integers(node + 1, inner + leaves - 1)), min_size=1, max_size=3)
        )
        graph[node] = tuple((child, 0) for child in children)
    graph |= dict.fromkeys(range(inner, inner + leaves), ())
    count = draw(st.integers(1, 4))
    roots = [draw(st.lists(st.integers(0, inner + leaves - 1), max_size=3)) for _ in range(count)]
    program = Program(graph, roots, [], draw(st.permutations(range(count))))
    reached = program.reached(node for nodes in roots for node in nodes)
    program.graph = {node: edges for node, edges in graph.items() if node in reached}
    recvs = draw(st.sets(st.integers(0, inner - 1)))
    program.recvs = [node for node in recvs if node in reached]
    return program


@given(programs())
def test_a_mask_names_the_sends_that_reach_the_node(program: Program) -> None:
    masks = mark(program.graph, program.roots)
    assert masks == {node: sum(1 << bit for bit in program.sends_of(node)) for node in program.graph}


@given(programs())
def test_batches_run_each_node_once_in_order_and_no_recv_waits_for_others(program: Program) -> None:
    plan = Plan(program.graph, dict(enumerate(program.roots)), program.recvs)
    inner = {node for node, edges in program.graph.items() if edges}
    heard: set[int] = set()
    ran: set[int] = set()
    for bit in program.order:
        heard.add(bit)
        ready = {node for node in inner if program.sends_of(node) <= heard}
        plan.heard(bit)
        batches = take_all(plan)
        for batch in batches:
            nodes = inner - ran if batch.way is Way.LAST else set(batch.nodes)
            check_batch(program, batch, nodes, ready, ran)
            ran |= nodes
        assert ready & set(program.recvs) <= ran, "a Recv that is ready has run"
        assert (batches != [] and batches[-1].way is Way.LAST) == (len(heard) == len(program.roots))
        # What is ready and did not run is tied to what is not ready: it could not have run without a cut.
        for node in ready - ran:
            assert tied(program, node, ran) - ready
    assert ran == inner
    assert plan.take() is None


def take_all(plan: Plan[int, int]) -> list[Batch[int]]:
    batches = []
    while (batch := plan.take()) is not None:
        batches.append(batch)
    return batches


def check_batch(program: Program, batch: Batch[int], nodes: set[int], ready: set[int], ran: set[int]) -> None:
    assert nodes <= ready
    assert not nodes & ran
    assert len(batch.nodes) == len(set(batch.nodes))
    if batch.way is not Way.LAST:
        assert nodes
        assert set(batch.recvs) == nodes & set(program.recvs)
    for node, edges in program.graph.items():
        children = {child for child, _ in edges if child is not None and program.graph[child]}
        if children & nodes:
            assert node in nodes | ran, "what leads to a batch has run or is part of it"
        if node in nodes and batch.way is Way.CLOSED:
            assert children <= nodes, "nothing leads out of a closed batch"


def tied(program: Program, start: int, ran: set[int]) -> set[int]:
    """All nodes that must run in one call with `start` if nothing is cut."""
    links: dict[int, set[int]] = {node: set() for node in program.graph}
    for node, edges in program.graph.items():
        for child, _ in edges:
            if child is not None and program.graph[child] and node not in ran:
                links[node].add(child)
                links[child].add(node)
    # Nodes of one mask run together whether or not an edge joins them.
    for node in program.graph:
        if program.graph[node]:
            links[node] |= {other for other in program.graph if same_region(program, node, other)}
    found = {start}
    frontier: Sequence[int] = [start]
    while frontier:
        frontier = list(set().union(*(links[node] for node in frontier)) - found)
        found |= set(frontier)
    return found


def same_region(program: Program, node: int, other: int) -> bool:
    return bool(program.graph[other]) and program.sends_of(node) == program.sends_of(other)


def test_one_send_is_one_last_batch() -> None:
    plan = Plan({0: ((1, 0),), 1: ()}, {0: [0]})
    assert plan.take() is None
    plan.heard(0)
    batch = plan.take()
    assert batch is not None and batch.way is Way.LAST
    assert plan.take() is None


def test_the_example_at_the_top_of_the_module() -> None:
    graph = {"f": (("g", 0), ("k", 0)), "g": (("leaf", 0),), "h": (("k", 0),), "k": (("leaf", 0),), "leaf": ()}
    cut = Plan(graph, {0: ["f"], 1: ["h"]}, recvs=["g"])
    cut.heard(0)
    batch = cut.take()
    assert batch is not None and batch.way is Way.CUT and set(batch.nodes) == {"f", "g"} and batch.recvs == ["g"]
    waits = Plan(graph, {0: ["f"], 1: ["h"]})
    waits.heard(0)
    assert waits.take() is None
    waits.heard(1)
    last = waits.take()
    assert last is not None and last.way is Way.LAST


def test_a_ready_region_waits_for_another_that_shares_its_child() -> None:
    # {a}: p and {a, b}: q both lead on; {c} is not heard, and p leads to what needs it. q hangs on p, r hangs on q.
    graph = {
        "p": (("q", 0), ("x", 0)),
        "r": (("q", 0),),
        "q": (("leaf", 0),),
        "x": (("leaf", 0),),
        "z": (("x", 0),),
        "leaf": (),
    }
    plan = Plan(graph, {0: ["p"], 1: ["r"], 2: ["z"]})
    plan.heard(0)
    assert plan.take() is None
    plan.heard(1)
    assert plan.take() is None, "r and q lead nowhere else, but q also needs p, and p leads to x"
    plan.heard(2)
    assert plan.take() is not None


def test_a_thousand_nested_sends_cost_little() -> None:
    count = 1000
    graph = {node: ((node + 1, 0),) for node in range(count)} | {count: ()}
    plan = Plan(graph, {node: [node] for node in range(count)}, recvs=range(0, count, 100))
    ran = 0
    for bit in range(count):
        plan.heard(bit)
        while (batch := plan.take()) is not None:
            ran += len(batch.nodes)
    assert ran <= count


def loop_of_calls(*, recvs: str) -> Plan[int, str]:
    """Sends 0 to 4, each in front of the next: f, which leads on to k and aside to r."""
    graph: dict[str, tuple[tuple[str, int], ...]] = {"end": ()}
    for number in range(5):
        graph |= {f"f{number}": ((f"r{number}", 0), (f"f{number + 1}" if number < 4 else "end", 0))}
        graph |= {f"r{number}": (("end", 0),)}
    plan = Plan(graph, {number: [f"f{number}"] for number in range(5)}, recvs=[f"r{number}" for number in recvs])
    plan.stages_from = 0
    plan.heard(0)
    return plan


def test_regions_one_behind_the_other_are_stages_of_one_batch() -> None:
    plan = loop_of_calls(recvs="01234")
    batch = plan.take()
    assert batch is not None and batch.way is Way.CUT and set(batch.nodes) == {"f0", "r0"}
    assert [(stage.sends, set(stage.nodes), stage.recvs, stage.behind) for stage in batch.stages] == [
        ([number], {f"f{number}", f"r{number}"}, [f"r{number}"], 10 - 2 * number) for number in (1, 2, 3)
    ]
    plan.heard(1)
    plan.follow(batch.stages[0])
    assert plan.take() is None, "it has run"
    plan.heard(2)
    follows = plan.take()
    assert follows is not None and set(follows.nodes) == {"f2", "r2"} and [s.sends for s in follows.stages] == [[3]]


def test_a_part_without_a_recv_is_a_stage_with_what_follows_it() -> None:
    batch = loop_of_calls(recvs="03").take()
    assert batch is not None
    (stage,) = batch.stages
    assert sorted(map(int, map(str, stage.sends))) == [1, 2, 3] and len(stage.nodes) == 6 and stage.recvs == ["r3"]


def test_few_nodes_behind_are_no_stage() -> None:
    plan = loop_of_calls(recvs="01234")
    plan.stages_from = 5
    batch = plan.take()
    assert batch is not None and [stage.sends for stage in batch.stages] == [[1], [2]]


def test_regions_side_by_side_are_no_stages() -> None:
    graph = {"p": (("x", 0), ("y", 0)), "x": (("q", 0),), "y": (("q", 0),), "q": (("leaf", 0),), "leaf": ()}
    plan = Plan(graph, {0: ["p"], 1: ["x"], 2: ["y"]}, recvs=["p", "x", "y"])
    plan.stages_from = 0
    plan.heard(0)
    batch = plan.take()
    assert batch is not None and batch.way is Way.CUT and not batch.stages
