"""What Telegrad needs of the machine: Linux, and a torch that it was tested with. Looked at when it is imported.

torch is not among the requirements that pip installs: whichever torch is there, a CPU or a CUDA build, is the user's
choice, and an installer that replaced it would do harm.
"""

import importlib.util
import re
import sys
import warnings
from pathlib import Path

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)  # the newest that the tests have run with


def check_requirements() -> None:
    """ImportError where Telegrad cannot work; a warning for a torch that is newer than those it was tested with."""
    if not sys.platform.startswith("linux"):
        raise ImportError(
            "Telegrad runs on Linux only: it uses epoll, eventfd, memfd and abstract Unix sockets, which "
            f"{sys.platform} does not have. On a Mac or on Windows use a Linux container or WSL 2"
        )
    installed = torch_version()
    if installed is None:
        raise ImportError(
            f"Telegrad needs torch {_shown(OLDEST_TORCH)} to {_shown(NEWEST_TORCH)}, and no torch is installed here. "
            "Install the build that suits this machine (pytorch.org says how), then import again"
        )
    problem = judge_torch(installed)
    if problem is not None:
        if release_of(installed) < OLDEST_TORCH:
            raise ImportError(problem)
        warnings.warn(problem, stacklevel=3)


def torch_version() -> str | None:
    """The version of the torch that would be imported, without importing it; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"__version__ = '([^']+)'", Path(spec.origin).with_name("version.py").read_text())
    return found[1] if found else "unknown"


def judge_torch(installed: str) -> str | None:
    """What is wrong with this version of torch, in words; None if nothing is."""
    release = release_of(installed)
    if release < OLDEST_TORCH:
        return (
            f"Telegrad needs torch {_shown(OLDEST_TORCH)} or newer (it is tested with {_shown(OLDEST_TORCH)} to "
            f"{_shown(NEWEST_TORCH)}), and {installed} is installed here. Update torch, then import again"
        )
    if release > NEWEST_TORCH:
        return (
            f"Telegrad was tested with torch {_shown(OLDEST_TORCH)} to {_shown(NEWEST_TORCH)}, and {installed} is "
            "installed here: it may work; if something fails, try one of those first"
        )
    return None


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as `2.13.0+cpu`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _shown(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
