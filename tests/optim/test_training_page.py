"""Every program in docs/training.md runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import own_port

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
LAST_LINES = ["weight lives on worker1", "trained 4 parameters on 2 workers", "both continue alike"]


@pytest.mark.slow
@pytest.mark.timeout(300)  # Up to four processes import torch, on a machine that may be busy.
@pytest.mark.parametrize(("program", "last_line"), list(zip(PROGRAMS, LAST_LINES, strict=True)), ids=LAST_LINES)
def test_a_program_of_the_page_runs(tmp_path: Path, program: str, last_line: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    command = [sys.executable, str(script)]
    with own_port() as port:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == last_line
