"""MPI: `mpirun` starts the workers, and `init_rpc()` finds the rest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CALL_ALL = """
import os
from telegrad import rpc

def who():
    return rpc.get_worker_info().name

me = rpc.init_rpc()
names = [info.name for info in rpc.get_worker_infos()]
answers = [rpc.rpc_sync(name, who) for name in names]
assert answers == names == [f"worker{rank}" for rank in range(3)], (answers, names)
os.write(1, f"called {len(answers)}\\n".encode())  # in one piece: the others write there, too
rpc.shutdown()
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_workers_under_mpirun_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "call_all.py"
    script.write_text(CALL_ALL)
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    command = ["mpirun", "-n", "3", "--oversubscribe", sys.executable, str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, **allow}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("called 3") == 3
