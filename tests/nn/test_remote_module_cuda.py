"""A RemoteModule on an accelerator: tensors are brought to it, results and state come back to host memory."""

from collections.abc import Iterator

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.training_cluster import cluster, layer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


@pytest.fixture(scope="module", autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(tmp_path_factory.mktemp("job"), ("ps0",)):
        yield


def device_of(param: object) -> str:
    return str(param.local_value().device)


@pytest.mark.parametrize("place", ["ps0/cuda:0", "rank:1/cuda:0"])
def test_it_trains_on_the_accelerator(place: str) -> None:
    remote, local = RemoteModule(place, layer, (0, 4, 2)), layer(0, 4, 2)
    references = remote.remote_parameters()
    assert [rpc.rpc_sync("ps0", device_of, args=(param,)) for param in references] == ["cuda:0"] * 2
    distributed = DistributedOptimizer(torch.optim.Adam, references, lr=0.1)
    optimizer = torch.optim.Adam(local.parameters(), lr=0.1)
    x = torch.arange(4.0, requires_grad=True)
    for _ in range(3):
        with autograd.context() as context_id:
            result = remote(x)
            assert result.device.type == "cpu"
            autograd.backward(context_id, [result.square().sum()])
            gradient = autograd.get_gradients(context_id)[x]
            norm = distributed.step(context_id, max_norm=1.0)
        optimizer.zero_grad()
        x.grad = None
        local(x).square().sum().backward()
        torch.testing.assert_close(gradient, x.grad)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(local.parameters(), 1.0))
        optimizer.step()
    torch.testing.assert_close(dict(remote.state_dict()), dict(local.state_dict()))

    fresh = DistributedOptimizer(torch.optim.Adam, references, lr=0.1)
    fresh.load_state_dict(distributed.state_dict())
    remote.load_state_dict(local.state_dict(), assign=True)
    assert rpc.rpc_sync("ps0", device_of, args=(remote.remote_parameters()[0],)) == "cuda:0"


def test_a_device_that_is_not_there_is_an_error_of_the_call() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        RemoteModule("ps0/cuda:100", layer, (0, 4, 2))(torch.ones(4))
