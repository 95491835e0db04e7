"""Ways to start workers on this machine: a cluster around a block of code, or a script on several workers at once."""

from telegrad.launch.cluster import Cluster, local_cluster

__all__ = ["Cluster", "local_cluster"]


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it
