"""Ways to start workers on this machine: a cluster around a block of code, or a script on several workers at once."""

from telegrad.launch.cluster import Cluster, local_cluster

__all__ = ["Cluster", "local_cluster"]
