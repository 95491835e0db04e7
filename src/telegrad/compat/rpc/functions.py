"""Stands in for `torch.distributed.rpc.functions`."""

from telegrad.rpc.functions import async_execution

__all__ = ["async_execution"]
