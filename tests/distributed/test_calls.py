import operator
import pytest
from telegrad import rpc
from tests.cluster import WAYS, Cluster, cluster

@pytest.fixture(scope="module", params=WAYS)
def job(request):
    with cluster(3, **WAYS[request.param]) as made:
        yield made

def test_by_name(job):
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3
