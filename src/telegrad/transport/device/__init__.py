"""Tensors on GPUs between two processes of one host: blocks of device memory, and who may use one when."""
