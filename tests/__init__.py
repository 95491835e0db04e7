"""The tests mirror `src/telegrad`; `distributed`, `oracle` and `conformance` use real processes."""
