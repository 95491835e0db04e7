"""The work that a step leaves in Python does not grow unnoticed. Unlike time, it has no noise."""

import sys

import pytest

from benchmarks.bytecodes import by_layer, measure

HELD = {  # bytecodes of CPython 3.11 for one step with 2x2 tensors, on its root and on the peer
    "step": (4_540, 3_440),
    "server": (5_300, 5_400),
}
ROOM = 1.1


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have other bytecodes")
def test_the_work_of_a_step_in_python() -> None:
    for case, counts in measure(*HELD).items():
        for name, count, held in zip(("root", "peer"), counts, HELD[case], strict=True):
            total = sum(count.values())
            assert total < ROOM * held, f"{case}, {name}: {total:.0f}, {held} before; by layer {by_layer(count)}"
            assert total > held / ROOM, f"{case}, {name}: only {total:.0f} bytecodes; lower the number held here"
