"""A pass within one worker: its graph, the regions of it that can run, and one call of torch's engine for each.

Nothing here sends or waits for a message: what a worker tells others of a pass is `engine/passes.py`.
"""
