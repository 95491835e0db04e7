"""What a worker notes of itself while somebody watches: calls, passes, waits, and what its GPU does."""
