"""Benchmarks that nothing else runs still find what they reach into."""

from benchmarks import counting


def test_what_is_counted_is_there() -> None:
    for module, name in counting._ENCODERS:
        assert callable(getattr(module, name)), f"{module.__name__} has no {name} any more"
