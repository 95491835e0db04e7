"""Random distributed programs.

Left to itself hypothesis draws mostly small ones; the least size is drawn first, so that many have deep calls and
graphs that several Sends share.
"""

from hypothesis import strategies as st

from tests.oracle.interpreter import CONTAINERS, MOVES, OPS
from tests.oracle.program import (
    Body,
    Call,
    Embed,
    Fetch,
    Hook,
    Keep,
    Kept,
    Leaf,
    Local,
    Parallel,
    Program,
    Remote,
    Segment,
    Step,
    shares_state,
)

MOST_WORKERS = 5
_positions = st.integers(0, 4)
_rarely = st.sampled_from([False] * 7 + [True])
_arguments = st.lists(_positions, min_size=1, max_size=3).map(tuple)
_simple: st.SearchStrategy[Step] = st.one_of(
    st.builds(Local, st.sampled_from(sorted(OPS)), _positions, _positions, _rarely),
    st.builds(Local, st.sampled_from(["add", "mul", "halves", *MOVES]), _positions, _positions),
    st.builds(Leaf, st.integers(0, 1)),
    st.builds(Embed, st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple)),
    st.builds(Hook, _positions, st.booleans()),
    st.builds(Keep, st.integers(0, 1), _positions),
    st.builds(Kept, st.integers(0, 1)),
    st.builds(Fetch, st.integers(0, 2)),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program over two to five workers."""
    workers = draw(st.integers(2, MOST_WORKERS))
    segments = draw(st.lists(_segments(workers), min_size=1, max_size=3))
    threads = draw(st.sampled_from([1, 1, 1, 1, 3]))
    return Program(workers, tuple(segments), draw(st.booleans()), threads)


@st.composite
def _segments(draw: st.DrawFn, workers: int) -> Segment:
    calls = draw(st.lists(_calls(workers, depth=3), min_size=1, max_size=3))
    body = draw(_bodies(workers, depth=3, longest=6))
    body = tuple(draw(st.permutations([*body, *calls])))
    roots = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    return Segment(body, tuple(roots), draw(_rarely))


@st.composite
def _bodies(draw: st.DrawFn, workers: int, depth: int, longest: int) -> Body:
    least = draw(st.sampled_from([0, longest // 2, longest - 1]))
    return tuple(draw(st.lists(_steps(workers, depth), min_size=least, max_size=longest)))


def _steps(workers: int, depth: int) -> st.SearchStrategy[Step]:
    if not depth:
        return _simple
    return st.one_of(_simple, _simple, _calls(workers, depth), _calls(workers, depth), _several(workers, depth))


@st.composite
def _calls(draw: st.DrawFn, workers: int, depth: int) -> Call:
    body = draw(_bodies(workers, depth - 1, longest=4))
    return Call(
        draw(st.integers(0, workers - 1)),
        draw(_arguments),
        body,
        results=draw(st.integers(1, 3)),
        container=draw(st.sampled_from(sorted(CONTAINERS))),
        no_grad=draw(_rarely),
        fails=draw(_rarely),
    )


@st.composite
def _several(draw: st.DrawFn, workers: int, depth: int) -> Step:
    """What runs beside the rest of the program. It must not share what workers store, or chance would decide."""
    if draw(st.booleans()):
        calls = draw(st.lists(_calls(workers, depth), min_size=2, max_size=3))
        apart = [call for call in calls if not shares_state(call.body)]
        return Parallel(tuple(apart or calls[:1]))
    body = draw(_bodies(workers, depth - 1, longest=3))
    alone = tuple(step for step in body if not shares_state((step,)))
    return Remote(draw(st.integers(0, workers - 1)), draw(_arguments), alone)
