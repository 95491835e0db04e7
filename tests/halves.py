"""Runs the suite as two processes: most tests wait for workers to start, end or time out, and leave cores idle.

    python -m tests.halves                 all tests, in two halves
    python -m tests.halves -k stream ...   with arguments: one pytest, with these

A test that fails only here depends on time; what one half prints stays together.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
# About half of the time. Whatever is not named here, new folders included, is in the other half.
FIRST = ("attacks", "autograd", "chaos", "compat", "conformance", "cuda", "distributed", "durable")
PYTEST = [sys.executable, "-m", "pytest", "--durations=20"]


def halves() -> tuple[list[str], list[str]]:
    """The folders and files of tests, each in one of the halves."""
    first = [str(FOLDER / name) for name in FIRST]
    others = [path for path in sorted(FOLDER.iterdir()) if path.is_dir() or path.name.startswith("test_")]
    second = [str(path) for path in others if path.name not in FIRST and _has_tests(path)]
    return first, second


def _has_tests(path: Path) -> bool:
    return path.is_file() or any(path.rglob("test_*.py"))


def main(arguments: list[str]) -> int:
    """The exit status of the half that ended worst."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    first, second = halves()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever ends a run that takes too long sees both halves
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen([*PYTEST, *second], stdout=output, stderr=subprocess.STDOUT)
        try:
            status = subprocess.call([*PYTEST, *first])
            beside.wait()
        finally:
            beside.kill()
            output.seek(0)
            sys.stdout.write(output.read().decode(errors="replace"))
            sys.stdout.flush()
    return max(status, beside.returncode, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
