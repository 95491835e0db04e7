"""`python -m telegrad.compat script.py args...` or `-m module args...`: run a program written for torch.distributed.rpc
on Telegrad, child processes included, without changing it.
"""

import os
import runpy
import sys
from pathlib import Path

from telegrad.compat import install
from telegrad.compat.children import CHILDREN, VARIABLE

_USAGE = """usage: python -m telegrad.compat script.py [args...]
       python -m telegrad.compat -m module [args...]

Runs a program that uses torch.distributed.rpc on Telegrad, with every process it starts."""


def adopt_children() -> None:
    """Have processes that this one starts, with this Python and this environment, install Telegrad, too."""
    root = Path(__file__).resolve().parents[2]
    os.environ[VARIABLE] = f"{sys.prefix}{os.pathsep}{root}"
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != CHILDREN]
    os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, *others])


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name, as Python itself would."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    adopt_children()
    install()
    if arguments[0] == "-m":
        if len(arguments) == 1:
            sys.exit("-m needs the name of a module")
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
