"""A worker dies between a gradient and its gradient."""

import pytest

from telegrad import autograd, rpc
from telegrad.errors import WorkerDied
from tests.cluster import cluster
from tests.distributed.test_higher_orders import chain, leaf, weights_of
from tests.oracle.interpreter import contexts_left
from tests.waiting import wait_until


@pytest.mark.slow
def test_a_worker_that_dies() -> None:
    with cluster(3) as job:
        x = leaf()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", chain, (1, x))
            (g,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True)
            job.kill("worker2")
            with pytest.raises(WorkerDied, match="worker2"):
                autograd.grad(context_id, [(g**2).sum()], [x, *weights_of(1)], timeout=60)
        wait_until(lambda: not rpc.rpc_sync("worker1", contexts_left))
