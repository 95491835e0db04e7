"""Stands in for `torch.distributed.rpc._testing`, under whose name it is imported."""

from telegrad.compat.rpc import faulty_agent
from telegrad.compat.rpc.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "faulty_agent", "is_available"]


def is_available() -> bool:
    """Whether workers can be made to fail on purpose; always."""
    return True
