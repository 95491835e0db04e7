"""A pytest fixture that is a local cluster.

from telegrad.testing import cluster

workers = cluster(3)                         # new processes for each test
shared = cluster(3, scope="module")          # the same for all tests of a module

def test_sum(workers):
    assert rpc.rpc_sync("worker1", sum, args=([1, 2],)) == 3
"""

from collections.abc import Iterator
from typing import Any, Literal

from telegrad.launch import Cluster, local_cluster

Scope = Literal["session", "package", "module", "class", "function"]


def cluster(workers: int = 3, *, scope: Scope = "function", **options: Any) -> Any:
    """A fixture: the test's process is `worker0` of a local cluster, and the fixture's value is its `Cluster`.

    Assign it to a name in a test module or `conftest.py`. A test that asks for that name runs inside the cluster, and
    can kill workers (`workers.kill("worker1")`) to see how its program takes it. `options` go to `local_cluster`.

    Examples:
        ```python
        workers = cluster(3, scope="module")

        def test_sum(workers):
            assert rpc.rpc_sync("worker1", sum, args=([1, 2],)) == 3
        ```
    """
    import pytest  # noqa: PLC0415 - a test has it; a program that only compares gradients need not

    @pytest.fixture(scope=scope)
    def started() -> Iterator[Cluster]:
        with local_cluster(workers, **options) as running:
            yield running

    return started
