"""Which devices tensors go to, and which maps are refused; decided from the records of workers, without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.cuda import order
from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.devices import Placement, check_maps
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.workers import Member
from telegrad.wire.tensor.specs import TensorSpec


@pytest.fixture(autouse=True)
def no_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of these records do not exist, so this process must not go on as if it used them."""
    monkeypatch.setattr(order, "active", order.active)
    monkeypatch.setattr(order, "used", list(order.used))


def member(number: int, gpus: tuple[str, ...] = ("a", "b"), **fields: Any) -> Member:
    return Member(f"w{number}", WorkerId(number), Incarnation(number + 1), (), 0, gpus=gpus, **fields)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (
            [member(0, device_maps={"w1": {"cuda:2": "cuda:0"}}), member(1)],
            "w0 has source devices with invalid indices",
        ),
        (
            [member(0, device_maps={"w1": {"cuda:0": "cuda:2"}}), member(1)],
            "w0 has target devices with invalid indices",
        ),
        ([member(0, device_maps={"w1": {"cpu": "cuda:0"}}), member(1, gpus=())], "w0 has target devices with invalid"),
        ([member(0, device_maps={"w9": {"cuda:0": "cuda:0"}}), member(1)], "w0 has invalid target node names"),
        (
            [member(0, device_maps={"w1": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}), member(1)],
            "w0 has duplicated target devices in its device map for w1",
        ),
        ([member(0, devices=("cuda:0", "cuda:0"))], "w0 has duplicated devices"),
        ([member(0, devices=("cuda:7",))], "w0 has devices with invalid indices"),
        (
            [member(0, devices=("cuda:1",), device_maps={"w1": {"cuda:0": "cuda:0"}}), member(1)],
            "w0 has unexpected source devices",
        ),
        (
            [member(0, device_maps={"w1": {"cuda:0": "cuda:0"}}), member(1, devices=("cuda:1",))],
            "w0 has unexpected target devices",
        ),
    ],
)
def test_a_map_that_cannot_be_is_refused(members: list[Member], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_maps(members, is_static=True)


def test_all_workers_name_the_same_one() -> None:
    bad = [member(i, device_maps={f"w{(i + 1) % 3}": {"cuda:0": "cuda:2"}}) for i in range(3)]
    for order_of_arrival in (bad, bad[::-1], [bad[1], bad[2], bad[0]]):
        with pytest.raises(
            ValueError, match="Node w0 has target devices with invalid indices in its device map for w1"
        ):
            check_maps(order_of_arrival, is_static=True)


def test_maps_that_can_be() -> None:
    check_maps([member(0, device_maps={"w1": {"cuda:1": "cuda:0", "cpu": "cuda:1"}}), member(1)], is_static=True)
    check_maps([member(0, device_maps={"later": {"cuda:1": "cuda:5"}})], is_static=False)


def specs(*devices: str) -> list[TensorSpec]:
    return [TensorSpec(0, 0, (1,), (), 0, i, 0, device) for i, device in enumerate(devices)]


def placed(options: RpcBackendOptions, me: Member, peer: Member, *devices: str, reply: bool = False) -> list[str]:
    return [spec.device for spec in Placement(options, me).place(peer, specs(*devices), reply)]


def test_a_map_serves_both_directions() -> None:
    options = RpcBackendOptions(device_maps={"w1": {0: 1, "cpu": 0}})
    published = {"w1": {"cuda:0": "cuda:1", "cpu": "cuda:0"}}
    here, there = member(0, device_maps=published), member(1)
    assert placed(options, here, there, "cuda:0", "") == ["cuda:1", "cuda:0"]
    assert placed(RpcBackendOptions(), there, here, "cuda:1", "cuda:0", reply=True) == ["cuda:0", ""]


def test_a_reply_goes_the_way_its_request_came() -> None:
    options = RpcBackendOptions(device_maps={"w0": {1: 1}})
    caller = member(0, device_maps={"w1": {"cuda:0": "cuda:1"}})
    assert placed(options, member(1), caller, "cuda:1", reply=True) == ["cuda:0"]
    assert placed(options, member(1), caller, "cuda:1") == ["cuda:1"]


def test_without_a_map_the_same_gpu_under_its_number_there() -> None:
    peer = member(1, gpus=("b", "a"), device_maps={"elsewhere": {"cuda:0": "cuda:0"}})
    assert placed(RpcBackendOptions(), member(0), peer, "cuda:0", "cuda:1", "") == ["cuda:1", "cuda:0", ""]


def test_a_gpu_that_the_other_does_not_see() -> None:
    peer = member(1, gpus=("z",), device_maps={"elsewhere": {"cuda:0": "cuda:0"}})
    with pytest.raises(RuntimeError, match="not available for destination w1, but found tensor on device: cuda:0"):
        placed(RpcBackendOptions(), member(0), peer, "cuda:0")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="of machines without CUDA")
def test_without_cuda_a_map_with_cuda_devices_is_refused(tmp_path: Path) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meeting", device_maps={"alone": {0: 0}})
    with pytest.raises(ValueError, match="alone has source devices with invalid indices"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
