"""Runs the suite as three processes: most tests wait for workers to start, end or time out, and leave cores idle.

    python -m tests.parts                 all tests, in three parts
    python -m tests.parts -k stream ...   with arguments: one pytest, with these

What one part prints stays together. What failed is run once more, alone, and that decides: three parts on two cores are
a load that no test of deadlines and deaths can foresee. The first failure is printed all the same.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# About a third of the time each. Whatever is not named here, new folders included, is the last part.
FIRST = ("attacks", "chaos", "compat", "conformance", "durable", "launch")
SECOND = ("autograd", "cuda", "distributed", "observe", "package")
PYTEST = [sys.executable, "-m", "pytest", "--durations=20"]
FAILED = pytest.ExitCode.TESTS_FAILED


def parts() -> list[list[str]]:
    """The folders and files of tests, each in one of the parts."""
    named = {*FIRST, *SECOND}
    others = [path for path in sorted(FOLDER.iterdir()) if path.is_dir() or path.name.startswith("test_")]
    last = [str(path) for path in others if path.name not in named and _has_tests(path)]
    return [[str(FOLDER / name) for name in FIRST], [str(FOLDER / name) for name in SECOND], last]


def _has_tests(path: Path) -> bool:
    return path.is_file() or any(path.rglob("test_*.py"))


def _command(number: int, tests: list[str]) -> list[str]:
    """Each part remembers for itself what failed."""
    return [*PYTEST, "-o", f"cache_dir=.pytest_cache/part{number}", *tests]


class Beside:
    """A part that runs beside the one that is shown; what it prints is shown at its end."""

    def __init__(self, command: list[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `show`
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)

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
    commands = [_command(number, tests) for number, tests in enumerate(parts(), start=1)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever ends a run that takes too long sees all parts
    beside = [Beside(command) for command in commands[1:]]
    try:
        statuses = [subprocess.call(commands[0])]
        statuses += [part.wait() for part in beside]
    finally:
        for part in beside:
            part.show()
    return max(map(_once_more, commands, statuses), key=abs)


def _once_more(command: list[str], status: int) -> int:
    """What failed of a part, alone. A part that ended in another way than by failing tests stays as it is."""
    if status != FAILED:
        return status
    print("\nWhat failed above, once more and alone:", flush=True)
    return subprocess.call([*command, "--last-failed", "--last-failed-no-failures=none"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
