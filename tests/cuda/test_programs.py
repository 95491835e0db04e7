"""Random distributed programs with tensors on the host and on the GPU leave what one process leaves."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, note, settings

from tests.cluster import Cluster, cluster
from tests.oracle.interpreter import check
from tests.oracle.program import Program, script
from tests.oracle.strategy import MOST_WORKERS, programs


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with cluster(MOST_WORKERS) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(program=programs())
def test_equals_one_process(workers: Cluster, program: Program) -> None:
    note(script(program))
    check(program, mixed=True)
