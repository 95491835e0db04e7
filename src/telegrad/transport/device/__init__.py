"""CUDA tensors between workers on one host: blocks of device memory, lent and borrowed over one connection."""
