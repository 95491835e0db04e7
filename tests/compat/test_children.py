"""`python -m telegrad.compat` takes along every process that a program starts, however it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program.py")
ROOT = Path(__file__).parents[2]
OUTPUT = "gradient [2.0, 2.0, 2.0] by telegrad.compat.rpc"


def run(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "telegrad.compat", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["torch", "fork", *(pytest.param(how, marks=pytest.mark.long) for how in ("spawn", "forkserver", "subprocess"))],
)
def test_a_script_and_its_workers_run_on_telegrad(how: str, tmp_path: Path) -> None:
    assert OUTPUT in run([str(PROGRAM), how, f"file://{tmp_path}/meeting"])


@pytest.mark.slow
def test_a_module_and_its_workers_run_on_telegrad(tmp_path: Path) -> None:
    assert OUTPUT in run(["-m", "tests.compat.program", "spawn", f"file://{tmp_path}/meeting"])


@pytest.mark.slow
def test_a_sitecustomize_of_the_environment_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'\n")
    ask = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"SEEN\"])'])"
    (tmp_path / "ask.py").write_text(ask)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert run([str(tmp_path / "ask.py")], PYTHONPATH=path).split() == ["yes"]


@pytest.mark.slow
def test_a_child_that_does_not_import_torch_does_not_import_telegrad(tmp_path: Path) -> None:
    question = "import sys; print('telegrad' in sys.modules)"
    (tmp_path / "ask.py").write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {question!r}])")
    assert run([str(tmp_path / "ask.py")]).split() == ["False"]


def test_without_a_program_it_says_how_to_use_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "telegrad.compat"], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 2
    assert "script.py" in done.stderr
