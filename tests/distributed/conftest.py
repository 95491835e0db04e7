"""The clusters that tests of real processes share: one per way between workers, kept for a module."""

from collections.abc import Iterator

import pytest

from tests.cluster import WAYS, Cluster, cluster


@pytest.fixture(scope="module", params=WAYS)
def job(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Four workers over each way."""
    with cluster(4, **WAYS[request.param]) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two workers over what they choose by themselves."""
    with cluster(2) as made:
        yield made
