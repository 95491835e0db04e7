"""Gradients of gradients over workers equal those of one process, for random programs of the second and third order."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.cluster import Cluster, cluster
from tests.oracle.higher import Higher, check
from tests.oracle.program import script
from tests.oracle.strategy import MOST_WORKERS, programs

_settings = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
)


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with cluster(MOST_WORKERS) as made:
        yield made


@pytest.mark.slow
@pytest.mark.chaos
@_settings
@given(higher=st.builds(Higher, programs(), st.sampled_from([2, 2, 3]), st.booleans()))
def test_equals_one_process(workers: Cluster, higher: Higher) -> None:
    note(f"order {higher.order}, by {'backward' if higher.by_backward else 'grad'}\n{script(higher.program)}")
    check(higher)
