"""The threads of an agent and how they wait: I/O threads, the timer, wake-ups, spinning."""
