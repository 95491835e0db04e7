"""Numbers kept as ranges are the same numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.rpc.server.ranges import Ranges


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_neighbours_become_one_range_in_any_order(order: tuple[int, ...]) -> None:
    ranges = Ranges()
    present: set[int] = set()
    for number in order:
        ranges.add(number)
        present.add(number)
        assert {n for n in range(-1, 7) if n in ranges} == present
        assert ranges.count == len([n for n in present if n - 1 not in present])
    assert repr(ranges) == "<Ranges 0-4>"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_against_a_set(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges()
    plain: set[int] = set()
    for adds, number in steps:
        if adds:
            ranges.add(number)
            plain.add(number)
        else:
            ranges.drop_below(number)
            plain = {n for n in plain if n >= number}
        assert {n for n in range(-1, 33) if n in ranges} == plain
        assert bool(ranges) == bool(plain)
        assert ranges.count == len([n for n in plain if n - 1 not in plain])


def test_a_long_row_with_a_hole_is_two_ranges() -> None:
    ranges = Ranges()
    for number in itertools.chain(range(1, 5000), range(5001, 10_000)):
        ranges.add(number)
    assert ranges.count == 2
    assert 5000 not in ranges
