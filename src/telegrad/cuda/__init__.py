"""The GPU of this process: the calls of the CUDA runtime that torch does not offer, and the order of work on streams.

Nothing here is imported for its effect, and nothing touches the GPU until a CUDA tensor is sent or received.
"""
