"""The implementations under comparison, as handles with the same names.

A case sees an `Api` and nothing else. Workers start with default options and rendezvous through the environment, as a
user's first program would, and with what `telegrad run` adds to it in Telegrad's case; only the TCP cases pass an
option, the one that switches shared memory off, and `benchmarks.tls` the one that encrypts.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

DEFAULT, TCP, TLS = "default", "tcp", "tls"


@dataclass(frozen=True)
class Api:
    """What a case may use of one implementation. Modules are imported when first asked for."""

    name: str
    rpc_module: str
    autograd_module: str
    optim_module: str
    tcp_options: Callable[[Any], Any]

    @cached_property
    def rpc(self) -> Any:
        return import_module(self.rpc_module)

    @cached_property
    def dist_autograd(self) -> Any:
        return import_module(self.autograd_module)

    @cached_property
    def DistributedOptimizer(self) -> Any:  # noqa: N802 (the name both implementations give it)
        return import_module(self.optim_module).DistributedOptimizer

    def variables(self, workers: int) -> dict[str, str]:
        """What its own launcher adds to the environment of so many workers on this machine."""
        if self.name != "telegrad":
            return {}
        from telegrad.rpc.threads.cores import variables_for

        return variables_for(workers, os.environ)

    def start(self, rank: int, world_size: int, transport: str) -> None:
        """Join the job as `worker<rank>`; MASTER_ADDR and MASTER_PORT are already set."""
        options = {}
        if transport == TCP:
            options = {"rpc_backend_options": self.tcp_options(self.rpc)}
        elif transport == TLS:  # Telegrad alone has it
            options = {"rpc_backend_options": self.rpc.RpcBackendOptions(transports=("tcp",), tls=True)}
        self.rpc.init_rpc(worker_name(rank), rank=rank, world_size=world_size, **options)

    def stop(self) -> None:
        self.rpc.shutdown()


TORCH = Api(
    "torch",
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.optim",
    lambda rpc: rpc.TensorPipeRpcBackendOptions(_transports=["uv"]),
)
# Without its shared-memory transport torch still reads large tensors out of the other process (its "cma" channel).
# This one has nothing but sockets; it differs from TORCH in the TCP cases only.
TORCH_SOCKETS = replace(
    TORCH,
    name="torch_sockets",
    tcp_options=lambda rpc: rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"]),
)
TELEGRAD = Api(
    "telegrad",
    "telegrad.rpc",
    "telegrad.autograd",
    "telegrad.optim",
    lambda rpc: rpc.RpcBackendOptions(transports=("tcp",)),
)
# Ray has no distributed autograd: `benchmarks.ray_peer` offers its actor calls under the names the call cases use.
RAY = Api("ray", "benchmarks.ray_peer", "benchmarks.ray_peer", "benchmarks.ray_peer", lambda rpc: rpc.tcp_options())
# Monarch likewise, for its actors.
MONARCH = Api(
    "monarch",
    "benchmarks.monarch_peer",
    "benchmarks.monarch_peer",
    "benchmarks.monarch_peer",
    lambda rpc: rpc.tcp_options(),
)

BY_NAME = {api.name: api for api in (TORCH, TELEGRAD, TORCH_SOCKETS, RAY, MONARCH)}
OPTIONAL = ("ray", "monarch")  # modules that are measured where they are installed


def worker_name(rank: int) -> str:
    return f"worker{rank}"


def importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


_here: list[Api] = []


def set_here(api: Api) -> None:
    """Say which implementation this worker process runs, for the functions of `work` that call on."""
    _here[:] = [api]


def here() -> Api:
    return _here[0]
