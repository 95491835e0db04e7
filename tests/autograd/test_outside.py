"""Calls outside any context: what their results are, and what is said of them."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.errors import GradientsEndHere
from telegrad.nn import RemoteModule
from tests.cluster import Cluster, cluster

WEIGHT = nn.Parameter(torch.ones(2))


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def weighted(x: Tensor) -> Tensor:
    return x * WEIGHT


def the_weight() -> nn.Parameter:
    return WEIGHT


def call_three_times() -> None:
    for _ in range(3):
        rpc.rpc_sync("worker1", weighted, (torch.ones(2),))


def test_each_call_site_is_told_once(pair: Cluster) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        call_three_times()
        result = rpc.rpc_sync("worker1", weighted, (torch.ones(2),))
    told = [each for each in caught if each.category is GradientsEndHere]
    assert len(told) == 2
    assert {each.filename for each in told} == {__file__}
    text = str(told[0].message)
    assert "weighted() on worker 'worker1' requires grad" in text
    assert "telegrad.autograd.context()" in text
    assert result.requires_grad and result.is_leaf  # as in torch: it may be a leaf of this worker's own


def test_the_call_site_of_a_module_within_a_model_is_that_of_the_model(pair: Cluster) -> None:
    """Not torch's own lines, which all modules share."""
    model = nn.Sequential(RemoteModule("worker1", nn.Linear, (2, 2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert [each.filename for each in caught if each.category is GradientsEndHere] == [__file__] * 2


def test_also_of_futures_and_references(pair: Cluster) -> None:
    with pytest.warns(GradientsEndHere):
        rpc.rpc_async("worker1", weighted, (torch.ones(2),)).wait()
    with pytest.warns(GradientsEndHere):
        rpc.remote("worker1", weighted, (torch.ones(2),)).to_here()


def test_a_place_that_fetches_many_references_is_told_once(pair: Cluster) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            rpc.remote("worker1", weighted, (torch.ones(2),)).to_here()
    (told,) = [each for each in caught if each.category is GradientsEndHere]
    assert "the result of to_here() of a reference on worker 'worker1' requires grad" in str(told.message)


def test_nothing_is_said_where_nothing_is_lost(pair: Cluster) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(rpc.rpc_sync("worker1", the_weight), nn.Parameter)  # a copy, and says so
        assert not rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).requires_grad
        with autograd.context():
            assert rpc.rpc_sync("worker1", weighted, (torch.ones(2),)).grad_fn is not None
        with torch.no_grad():
            assert not rpc.rpc_sync("worker1", weighted, (torch.ones(2),)).requires_grad
            future = rpc.rpc_async("worker1", weighted, (torch.ones(2),))
        assert not future.wait().requires_grad
