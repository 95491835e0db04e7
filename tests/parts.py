"""Runs the suite as several processes: most tests wait for workers to start, end or time out, and leave cores idle.

    python -m tests.parts                 all tests, in three parts; where there are many cores, in more
    python -m tests.parts -k stream ...   with arguments: one pytest, with these

A test that fails only here depends on time; what one part prints stays together.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
# About a third of the time each. Whatever is not named here, new folders included, is the last part.
FIRST = ("attacks", "chaos", "compat", "conformance", "durable", "launch")
SECOND = ("autograd", "cuda", "distributed", "observe", "package")
PYTEST = [sys.executable, "-m", "pytest", "--durations=20"]


_MANY_CORES = 8
# There is one GPU.
_TOGETHER = ("cuda",)


def parts(cores: int) -> list[list[str]]:
    """The folders and files of tests, each in one of the parts."""
    return _by_folder() if cores < _MANY_CORES else _by_size(3 * cores // 4)


def _by_size(count: int) -> list[list[str]]:
    """So many parts with about as many lines each, as far as that goes: a file is not divided."""
    lots = [[path] for path in FOLDER.rglob("test_*.py") if not {*path.parts} & {*_TOGETHER}]
    lots += [sorted((FOLDER / name).rglob("test_*.py")) for name in _TOGETHER]
    sizes = {tuple(lot): sum(path.read_bytes().count(b"\n") for path in lot) for lot in lots}
    made: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for lot in sorted(sizes, key=lambda each: (-sizes[each], each)):
        smallest = min(range(count), key=lambda number: made[number][0])
        lines, paths = made[smallest]
        made[smallest] = (lines + sizes[lot], [*paths, *map(str, lot)])
    return [paths for _, paths in made]


def _by_folder() -> list[list[str]]:
    named = {*FIRST, *SECOND}
    others = [path for path in sorted(FOLDER.iterdir()) if path.is_dir() or path.name.startswith("test_")]
    last = [str(path) for path in others if path.name not in named and _has_tests(path)]
    return [[str(FOLDER / name) for name in FIRST], [str(FOLDER / name) for name in SECOND], last]


def _has_tests(path: Path) -> bool:
    return path.is_file() or any(path.rglob("test_*.py"))


class Beside:
    """A part that runs beside the one that is shown; what it prints is shown at its end."""

    def __init__(self, tests: list[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `show`
        self._process = subprocess.Popen([*PYTEST, *tests], stdout=self._output, stderr=subprocess.STDOUT)

    def wait(self) -> int:
        """Its exit status."""
        return self._process.wait()

    def show(self) -> None:
        """Show what it printed; it ends, if it runs."""
        self._process.kill()
        self._process.wait()
        with self._output as output:
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
            sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """The exit status of the part that ended worst."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    shown, *others = parts(len(os.sched_getaffinity(0)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever ends a run that takes too long sees all parts
    beside = [Beside(tests) for tests in others]
    try:
        statuses = [subprocess.call([*PYTEST, *shown])]
        statuses += [part.wait() for part in beside]
    finally:
        for part in beside:
            part.show()
    return max(statuses, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
