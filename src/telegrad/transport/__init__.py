"""Streams between two workers, and the memory that tensors travel in."""
