"""The compiled kernel that is shipped is that of the source beside it; checked where there is a compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "src/telegrad/cuda/copy_kernel.ptx"


def entry(text: str) -> list[str]:
    """The code itself, without what the compiler says of its own version."""
    return text[text.index(".visible .entry") :].split()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_shipped_kernel_is_that_of_the_source(tmp_path: Path) -> None:
    made = tmp_path / "made.ptx"
    command = ["nvcc", "-arch=compute_75", "-ptx", "-O3", str(SHIPPED.with_suffix(".cu")), "-o", str(made)]
    subprocess.run(command, check=True, timeout=120)
    assert entry(made.read_text()) == entry(SHIPPED.read_text())


def test_the_shipped_kernel_asks_for_no_new_driver() -> None:
    lines = SHIPPED.read_text().splitlines()
    assert ".version 6.5" in lines and ".target sm_75" in lines
