"""Telegrad and its peers side by side, in one run: `python -m benchmarks`.

Every case is one function written against the interface that the implementations share, so nothing can be tuned for one
of them. Each implementation keeps its own worker processes, started with default options; rounds alternate between the
implementations, so that whatever else the machine does falls on all of them.

    cases       what is measured: one function per case, with its bar, its aim and its limit
    apis        the implementations: modules to call, and how a worker of each starts
    work        what runs on the other workers
    worker      one worker process: does what the harness orders
    cluster     the harness's view of a set of workers: orders, deadlines, their end
    parent_death   no process outlives the harness
    harness     rounds, interleaved; a case that cannot run is reported and the rest goes on
    footprint   what needs a fresh interpreter: import time, memory of an idle worker
    limits      what the machine itself can do, measured in the same run
    figures     pure: medians, ratios, spreads, units
    report      table, JSON, comparison with a saved baseline;  plot: the picture
"""
