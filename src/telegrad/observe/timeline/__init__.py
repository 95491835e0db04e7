"""One timeline over all workers: their events are collected, their clocks aligned, and one file is written."""
