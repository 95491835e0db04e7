"""What the README, the quickstart and the page on training that survives show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def programs(page: str) -> list[str]:
    """The Python blocks of a page that are whole programs: they begin with an import."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return [block for block in blocks if block.startswith(("import", "from"))]


CASES = [
    (page, number)
    for page in ("README.md", "docs/quickstart.md", "docs/durable.md")
    for number in range(len(programs(page)))
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), CASES)
def test_a_page_shows_what_runs(page: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(programs(page)[number])
    launcher = ["-m", "telegrad", "run", "-n", "2"] if "RANK" in script.read_text() else []
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if page == "README.md":
        assert done.stdout == "tensor([[1., 1.],\n        [1., 1.]])\n"
