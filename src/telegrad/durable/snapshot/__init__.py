"""What is saved of a run and where it is kept: states of values, copies of them, in memory and on disk."""
