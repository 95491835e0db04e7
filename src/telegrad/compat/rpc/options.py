"""Stands in for `torch.distributed.rpc.options`: options whose type says which backend is meant."""

from telegrad.rpc.options import RpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Telegrad's options under torch's name; `_transports` and `_channels` name parts of TensorPipe and are ignored."""

    same_gpu_without_map = False
