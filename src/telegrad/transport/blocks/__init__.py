"""Memory that tensors travel in and that is used again: touched pages cost a fifth of fresh ones.

A pool keeps what the traffic of the last moments used: whoever owns it calls `trim` now and then, and what has been
idle for longer goes back to the system.
"""
