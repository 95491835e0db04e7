"""Where tensors go on another worker, by the device maps of both: as the sender's map for that worker says, or that
worker's own, reversed. So a map given on one side serves calls, their replies, and the gradients that flow back.

Without a map a CUDA tensor goes to the same physical GPU, if the other worker sees it; with torch's own options that is
refused, as it is by torch. What the maps of all workers say is checked when a worker joins.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from telegrad.cuda import order
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.workers import Member
from telegrad.transport.device.blocks import budget
from telegrad.wire.tensor.on_device import describe_on_device
from telegrad.wire.tensor.segments import Segment
from telegrad.wire.tensor.small import describe_small
from telegrad.wire.tensor.specs import TensorSpec
from telegrad.wire.tensor.tensors import describe

Memory: TypeAlias = Sequence[Segment] | bytes

_EVERYWHERE = ("", "cpu", "meta")


def as_published(options: RpcBackendOptions) -> dict[str, dict[str, str]]:
    """The maps of a worker as the others get to know them."""
    return {to: {str(k): str(v) for k, v in device_map.items()} for to, device_map in options.device_maps.items()}


class Placement:
    """Says for one agent where its tensors go."""

    def __init__(self, options: RpcBackendOptions, me: Member) -> None:
        self._maps = options.device_maps
        self._same_gpu = options.same_gpu_without_map
        self._me = me
        self._tables: dict[tuple[int, bool], tuple[Member, dict[str, str]]] = {}
        named = [device for device_map in self._maps.values() for device in device_map]
        for device in [*named, *options.devices]:
            if device.type == "cuda" and device.index is not None and device.index < len(me.gpus):
                order.use(device.index)
        if self._maps:
            order.activate()
        budget.share = options.cuda_memory_share
        order.direct = options.cuda_direct

    def describe(
        self, peer: Member, tensors: Sequence[Tensor], reply: bool = False
    ) -> tuple[Sequence[TensorSpec], Memory]:
        """The specs of tensors for `peer`, with the devices they will have there, and their memory.

        To be called where there are CUDA tensors or maps at all. RuntimeError if nobody said where a tensor goes."""
        found = None
        if tensors[0].is_cuda:
            found = describe_on_device(tensors)
        elif not self._table(peer, reply).get(""):  # else those of the host will not stay there
            small = describe_small(tensors)
            if small is not None:
                return small
        specs, memory = found or describe(tensors)
        if len(specs) == 1 and self._table(peer, reply).get(specs[0].device) == specs[0].device:
            return specs, memory  # as usual: to a GPU that has the same number there
        return self.place(peer, specs, reply), memory

    def place(self, peer: Member, specs: Sequence[TensorSpec], reply: bool = False) -> Sequence[TensorSpec]:
        """Specs with the devices that their tensors will have at `peer`."""
        table = self._table(peer, reply)
        for spec in specs:
            if table.get(spec.device) != spec.device:
                break
        else:
            return specs  # a GPU that has the same number there
        placed = []
        for spec in specs:
            target = table.get(spec.device, spec.device if spec.device in _EVERYWHERE else None)
            if target is None:
                raise self._unmapped(spec.device, peer, reply)
            placed.append(spec if target == spec.device else msgspec.structs.replace(spec, device=target))
        return placed

    def _table(self, peer: Member, reply: bool) -> dict[str, str]:
        """By the name of a device here, its counterpart there. "" is the CPU."""
        known = self._tables.get((peer.incarnation, reply))
        if known is not None and known[0] is peer:
            return known[1]
        table: dict[str, str] = {}
        if self._same_gpu:
            theirs = {gpu: index for index, gpu in enumerate(peer.gpus)}
            table = {f"cuda:{i}": f"cuda:{theirs[gpu]}" for i, gpu in enumerate(self._me.gpus) if gpu in theirs}
        ours = {str(here): str(there) for here, there in self._maps.get(peer.name, {}).items()}
        back = {there: here for here, there in peer.device_maps.get(self._me.name, {}).items()}
        first, second = (back, ours) if reply else (ours, back)  # a reply goes the way its request came
        for here, there in {**second, **first}.items():
            table["" if here == "cpu" else here] = "" if there == "cpu" else there
        self._tables[peer.incarnation, reply] = (peer, table)
        return table

    def _unmapped(self, device: str, peer: Member, reply: bool) -> RuntimeError:
        hint = "" if not self._same_gpu else " That worker does not see the same GPU, either."
        what = "Response" if reply else "Request"
        return RuntimeError(
            "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before "
            f"sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly "
            f"configure device mapping. {what} device mapping is not available for destination {peer.name}, but found "
            f"tensor on device: {device}.{hint}"
        )


def check_maps(members: Iterable[Member], is_static: bool) -> None:
    """Raise ValueError for device maps that name devices or workers which are not there, with torch's words.

    By rank, so that all workers name the same one."""
    known = {member.name: member for member in sorted(members, key=lambda member: member.worker_id)}
    for member in known.values():
        if len(set(member.devices)) != len(member.devices):
            raise ValueError(f"Node {member.name} has duplicated devices\ndevices = {member.devices}")
        if not _exist(member.devices, member):
            raise ValueError(
                f"Node {member.name} has devices with invalid indices\ndevices = {member.devices}\n"
                f"device count = {len(member.gpus)}"
            )
    for member in known.values():
        if is_static and not member.device_maps.keys() <= known.keys():
            raise ValueError(
                f"Node {member.name} has invalid target node names in its device maps\n"
                f"device maps = {list(member.device_maps)}\nnode names = {list(known)}"
            )
        for to, device_map in member.device_maps.items():
            _check_map(member, to, device_map, known.get(to))


def _check_map(member: Member, to: str, device_map: Mapping[str, str], target: Member | None) -> None:
    if len(set(device_map.values())) != len(device_map):
        raise _bad_map(member, to, device_map, "duplicated target devices")
    for role, worker, names in (("source", member, device_map.keys()), ("target", target, device_map.values())):
        if worker is None:
            continue  # it may come later
        if worker.devices:
            if not set(names) <= set(worker.devices):
                raise _bad_map(member, to, device_map, f"unexpected {role} devices")
        elif not _exist(names, worker):
            raise _bad_map(member, to, device_map, f"{role} devices with invalid indices")


def _bad_map(member: Member, to: str, device_map: Mapping[str, str], what: str) -> ValueError:
    return ValueError(f"Node {member.name} has {what} in its device map for {to}\ndevice map = {dict(device_map)}")


def _exist(names: Collection[str], member: Member) -> bool:
    """Whether a worker has all of these devices."""
    for name in names:
        device = torch.device(name)
        if device.type != "cpu" and (device.type != "cuda" or (device.index or 0) >= len(member.gpus)):
            return False
    return True
