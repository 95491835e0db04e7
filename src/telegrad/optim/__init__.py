"""Training parameters that live on several workers: one optimizer to the trainer, one torch optimizer per owner.

Read `shares.py` (who owns what), then `owner.py` (what runs next to the parameters), then `optimizer.py`.
"""

from telegrad.optim.clip import clip_grad_norm_
from telegrad.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it
