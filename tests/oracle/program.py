"""A distributed program as data: what each worker does, and from where backward passes start.

Values are named by position, modulo how many there are, so every program that can be drawn can run, and so can every
smaller one. Bodies of calls are programs of their own; they begin with a leaf and the arguments, and return their last
values.
"""

from typing import NamedTuple, TypeAlias


class Leaf(NamedTuple):
    """Take a parameter of this worker."""

    number: int


class Embed(NamedTuple):
    """Look rows up in this worker's embedding, whose gradients are sparse."""

    rows: tuple[int, ...]


class Local(NamedTuple):
    """Compute something from two values."""

    op: str
    left: int
    right: int
    no_grad: bool = False


class Hook(NamedTuple):
    """Watch the gradient of a value, and double it where that is said."""

    value: int
    doubling: bool


class Keep(NamedTuple):
    """Store a value on this worker, for any later call."""

    shelf: int
    value: int


class Kept(NamedTuple):
    """Take what was stored on this worker."""

    shelf: int


class Call(NamedTuple):
    """Run a body on a worker, which may be this one."""

    worker: int
    arguments: tuple[int, ...]
    body: "Body"
    results: int  # how many values come back
    container: str  # in what
    no_grad: bool = False
    fails: bool = False  # the body raises when it is through, and the caller goes on


class Parallel(NamedTuple):
    """Make several calls at once."""

    calls: tuple[Call, ...]


class Remote(NamedTuple):
    """Have a body run on a worker, and keep a reference to its last value."""

    worker: int
    arguments: tuple[int, ...]
    body: "Body"


class Fetch(NamedTuple):
    """Take the value of a reference, wherever it is; a body knows the references of its caller."""

    reference: int


Step: TypeAlias = Leaf | Embed | Local | Hook | Keep | Kept | Call | Parallel | Remote | Fetch
Body: TypeAlias = tuple[Step, ...]


class Segment(NamedTuple):
    """Some steps on the first worker, then a backward pass from some values; from none if there are no roots."""

    body: Body
    roots: tuple[int, ...]
    grad_tensors: bool = False


class Program(NamedTuple):
    """A whole program. All its passes but the last retain the graph."""

    workers: int
    segments: tuple[Segment, ...]
    leaf_hooks: bool = False
    threads: int = 1  # how many run it at once, each in a context of its own


def shares_state(body: Body) -> bool:
    """Whether a body, or one that it calls, leaves or uses what others can see: then the order of calls matters.

    That is what workers store, and hooks, for the value may be a leaf or one that others hold, too."""
    for step in body:
        match step:
            case Keep() | Kept() | Hook():
                return True
            case Call() | Remote() if shares_state(step.body):
                return True
            case Parallel() if any(shares_state(call.body) for call in step.calls):
                return True
    return False


SCRIPT = """\
# Run from the root of the repository: python {name}
from tests.cluster import cluster
from tests.oracle.interpreter import check
from tests.oracle.program import *

program = {program}

if __name__ == "__main__":
    with cluster(program.workers):
        check(program)
        print("no difference")
"""


def script(program: Program, name: str = "program.py") -> str:
    """A program that runs `program` both ways and shows the difference."""
    return SCRIPT.format(name=name, program=repr(program))
