"""Remote profiling: a profile that is taken on one worker also holds what its calls did on others.

`remote.py` wraps calls made under a profiler and profiles those that come so wrapped; `merging.py` puts the events that
come back into the profile they belong to, whichever of torch's profilers takes it.
"""
