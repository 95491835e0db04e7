"""What `pip install` takes: the wheel and the sdist have all of the package and nothing else, and the wheel imports."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import telegrad

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that git has, without a network: the build needs setuptools alone."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in filter(None, map(bytes.decode, files)):
        if name.split("/")[0] in ("src", "pyproject.toml", "README.md", "LICENSE"):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    return folder


def modules() -> set[str]:
    """All that the package consists of: modules, the mark of its types, the files of the live page."""
    source = ROOT / "src"
    files = (path for path in source.glob("telegrad/**/*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(source)) for path in files}


def test_the_wheel_has_every_module(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"telegrad-{telegrad.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules() <= names
    assert {"telegrad/py.typed", "telegrad/observe/live/static/index.html"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"telegrad"}
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not any("torch" in line for line in required)  # pip must never replace the user's


def test_the_sdist_has_the_sources(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {f"src/{module}" for module in modules()} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_the_wheel_can_be_used(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import telegrad; assert telegrad.__file__.startswith({str(tmp_path)!r}), telegrad.__file__
from telegrad import rpc
with telegrad.local_cluster(workers=2):
    assert rpc.rpc_sync("worker1", pow, (2, 3)) == 8
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150, cwd=tmp_path)
