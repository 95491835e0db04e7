"""Each program of the table gives over workers what it gives in one process, or is refused by name."""

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, cluster
from tests.features import programs
from tests.features.table import TABLE, VARIANTS, check

assert programs.ALL


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with cluster(4) as made:
        yield made


@pytest.mark.parametrize("name", TABLE)
def test_equal_to_one_process(workers: Cluster, name: str) -> None:
    check(name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name, entry in TABLE.items() for variant in VARIANTS[1:] if variant in entry.variants],
)
def test_equal_as_a_variant(workers: Cluster, name: str, variant: str) -> None:
    """As nested calls over three workers, with unused results, and with a retained graph run twice."""
    check(name, variant)
