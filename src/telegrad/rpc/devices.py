"""Where a tensor goes that is not on the CPU: as the sender's map for that worker says, or that worker's own, reversed.

So a map given on one side serves calls, their replies, and the gradients that flow back.
"""

from collections.abc import Mapping

import msgspec
import torch

from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.workers import Member
from telegrad.wire.specs import TensorSpec

_EVERYWHERE = ("", "cpu", "meta")


def as_published(options: RpcBackendOptions) -> dict[str, dict[str, str]]:
    """The maps of a worker as the others get to know them."""
    return {to: {str(k): str(v) for k, v in device_map.items()} for to, device_map in options.device_maps.items()}


def place(options: RpcBackendOptions, here: str, peer: Member, specs: list[TensorSpec]) -> list[TensorSpec]:
    """The specs of tensors for `peer`, with the devices they will have there. RuntimeError if nobody said which."""
    if all(spec.device in _EVERYWHERE for spec in specs):
        return specs
    device_map: Mapping[torch.device, torch.device] = options.device_maps.get(peer.name, {})
    back = {torch.device(there): torch.device(ours) for ours, there in peer.device_maps.get(here, {}).items()}
    placed = []
    for spec in specs:
        if spec.device in _EVERYWHERE:
            placed.append(spec)
            continue
        device = torch.device(spec.device)
        target = device_map.get(device) or back.get(device)
        if target is None:
            raise RuntimeError(
                "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before "
                f"sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly "
                f"configure device mapping. {spec.device} has no counterpart on worker {peer.name!r}"
            )
        placed.append(msgspec.structs.replace(spec, device="" if target.type == "cpu" else str(target)))
    return placed
