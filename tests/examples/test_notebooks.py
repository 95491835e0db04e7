"""The notebooks run from top to bottom in a fresh kernel: functions of cells on workers, bars and plots."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def test_they_are_kept_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells), path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "says"), [("parameter_server", "largest error of a weight: 0.0"), ("rnn", "the quick brown fox")]
)
def test_a_notebook_runs(name: str, says: str, tmp_path: Path) -> None:
    executed = tmp_path / "executed.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOKS / f"{name}.ipynb"), str(executed)]
    own = {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path), "MPLBACKEND": ""}
    environment = {key: value for key, value in {**os.environ, **own}.items() if value}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(executed.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert says in printed, printed
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "Traceback" not in printed and not [o for o in outputs if o.get("name") == "stderr"], outputs
