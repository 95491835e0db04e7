"""What tests with a GPU share. Without one they are skipped; those that need two GPUs are skipped below two."""

from collections.abc import Iterator

import pytest
import torch

from tests.cluster import Cluster, cluster

MAP = {0: 0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.device_count() == 0:
        for item in items:
            if "tests/cuda/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two workers over what they choose by themselves, without a device map."""
    with cluster(2) as made:
        yield made
