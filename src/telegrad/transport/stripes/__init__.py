"""Several TCP connections for one large message: see `docs/decisions/` on stripes, and `stripes.py`."""
