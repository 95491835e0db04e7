"""For a user's own tests: a cluster as a fixture, and a check of a distributed program against one process."""

from telegrad.testing.fixtures import cluster
from telegrad.testing.gradients import check_distributed_grads

__all__ = ["check_distributed_grads", "cluster"]


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it
