"""PyTorch's own tests of torch.distributed.rpc and .autograd, which ship inside torch, run against Telegrad.

    python -m tests.conformance                     all that are expected to pass
    python -m tests.conformance -k test_backward    those whose name contains this
    python -m tests.conformance --sample            a part of each suite, as `make test` runs it
    python -m tests.conformance --others            those listed in not_expected.toml, to see whether one passes by now

`suites.py` loads torch's test classes with Telegrad in place, `trial.py` runs one test in processes of its own, and
`not_expected.toml` lists each test that is not expected to pass, with the reason.
"""
