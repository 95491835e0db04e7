"""Stands in for `torch.distributed.rpc.options`: options whose type says which backend is meant."""

from typing import Any

from telegrad.rpc.options import RpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Telegrad's options under torch's name; `_transports` and `_channels` name parts of TensorPipe and are ignored.

    Programs written for torch know of no secret, so between hosts they go without one, with a warning."""

    same_gpu_without_map = False

    def __init__(self, *, insecure: bool = True, **options: Any) -> None:
        super().__init__(insecure=insecure, **options)
