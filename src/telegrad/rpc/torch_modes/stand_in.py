"""Where a program can tell Telegrad from torch.distributed.rpc, and which of the two it meets in this process.

`telegrad.compat` puts `TORCHS` in force while it stands in for torch's modules. Whoever behaves in two ways reads
`in_force` when it comes to that, never on the path of a call that succeeds.
"""

from typing import NamedTuple


class Behaviour(NamedTuple):
    """One side of each difference."""

    cancels_at_timeout: bool  # the worker is told of a call past its timeout, and stops; in torch it still runs
    errors_take_parts: bool  # an exception pickle alone cannot rebuild keeps its type; in torch it is a RuntimeError
    rrefs_show_types: bool  # repr of a reference tells what it refers to; torch's has a text that programs may read


OURS = Behaviour(cancels_at_timeout=True, errors_take_parts=True, rrefs_show_types=True)
TORCHS = Behaviour(cancels_at_timeout=False, errors_take_parts=False, rrefs_show_types=False)

in_force = OURS


def use(behaviour: Behaviour) -> None:
    """From now on, in this process."""
    global in_force  # noqa: PLW0603 - one for the process, as the modules that are replaced are
    in_force = behaviour
