"""Stands in for `torch.distributed.optim.optimizer`."""

from telegrad.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
