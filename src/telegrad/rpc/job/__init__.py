"""How a job begins and ends: rendezvous store, joining, barriers, shutdown."""
