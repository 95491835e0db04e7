"""Who the other workers are, how connections to them come about, and who is alive."""
