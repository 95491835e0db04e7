"""The work that a step leaves in Python does not grow unnoticed. Unlike time, it has no noise."""

import sys

import pytest

from benchmarks.bytecodes import by_layer, measure

ROOT, PEER = 4_540, 3_440  # bytecodes of CPython 3.11 for one autograd step with 2x2 tensors
ROOM = 1.1


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have other bytecodes")
def test_the_work_of_a_step_in_python() -> None:
    root, peer = measure("step")["step"]
    for name, count, held in (("root", root, ROOT), ("peer", peer, PEER)):
        total = sum(count.values())
        assert total < ROOM * held, f"{name}: {total:.0f} bytecodes, {held} before; by layer {by_layer(count)}"
        assert total > held / ROOM, f"{name}: only {total:.0f} bytecodes; lower the number held here"
