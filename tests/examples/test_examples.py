"""Every example runs as a user would run it, on small settings, and learns.

Each takes 10 to 20 seconds of a core, most of it for processes that import torch. Those that show nothing another
shows, and those that run as a notebook, run in the long profile.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {
    "on_ray": ["pipeline", "--steps", "40"],  # by `make test-engines`
    "demo": ["--epochs", "3"],
    "parameter_server": ["--steps", "30"],
    "rnn": ["--steps", "12"],
    "pipeline": ["--steps", "12", "--batch", "64"],
    "reinforcement": ["--rounds", "6"],
    "split_learning": ["--steps", "40"],
    "sharded_embedding": ["--steps", "20"],
    "maml": ["--rounds", "60"],
    "wgan_gp": ["--steps", "60"],
    "survive": ["--steps", "40", "--kills", "2"],
}
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("demo_picture", "showing"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs a program as a user would, with a folder for its plot; what it printed. It must have drawn something."""

    def start(name: str, picture: str = "", *, settings: Sequence[str] | None = None) -> str:
        given = SETTINGS[name] if settings is None else settings
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *given, "--output", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
        assert done.returncode == 0, done.stderr
        assert not re.search("Warning|Traceback|SIGABRT", done.stderr), done.stderr
        assert (tmp_path / (picture or f"{name}.png")).stat().st_size > 10_000
        assert re.search(r"^[a-z-]+ \d+/\d+  ", done.stdout, flags=re.MULTILINE)  # a bar, without a terminal
        return done.stdout

    return start


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name", ["pipeline", *(pytest.param(name, marks=pytest.mark.long) for name in ("rnn", "sharded_embedding", "maml"))]
)
def test_the_loss_falls(name: str, run: Callable[..., str]) -> None:
    found = re.search(r"loss ([\d.]+) -> ([\d.]+)\n$", run(name))
    assert found
    assert float(found[2]) < float(found[1])


@pytest.mark.long
def test_the_parameter_server_finds_the_weights(run: Callable[..., str]) -> None:
    found = re.search(r"largest error of a weight: ([\d.]+)", run("parameter_server"))
    assert found
    assert float(found[1]) < 0.1


@pytest.mark.long
def test_the_generator_finds_the_circle(run: Callable[..., str]) -> None:
    found = re.search(r"distance to the circle ([\d.]+) -> ([\d.]+)\n$", run("wgan_gp"))
    assert found
    assert float(found[2]) < 0.7 * float(found[1])


@pytest.mark.long
def test_the_agent_gets_somewhere(run: Callable[..., str]) -> None:
    assert re.search(r"mean return -?[\d.]+ -> -?[\d.]+ \(best possible 0\.92\)", run("reinforcement"))


@pytest.mark.long
def test_two_parties_learn_together(run: Callable[..., str]) -> None:
    found = re.search(r"accuracy ([\d.]+)% -> ([\d.]+)%", run("split_learning"))
    assert found
    assert float(found[2]) > 70


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_learns_and_draws(tmp_path: Path, run: Callable[..., str]) -> None:
    out = run("demo")
    assert float(re.findall(r"held-out ([\d.]+)%", out)[-1]) > 85
    page = (tmp_path / "demo.html").read_text()
    assert "<svg" in page and "<h1>" in page and "0.00 ms" not in page
    assert (tmp_path / "timeline.json").exists()
    for worker in ("trainer", "stem", "trunk", "server"):
        assert worker in page


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_survives(run: Callable[..., str]) -> None:
    assert "2 deaths; every bit as in an undisturbed run: True" in run("survive")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_adapters_learn_what_the_frozen_model_did_not(run: Callable[..., str]) -> None:
    settings = ["--pretrain", "12", "--steps", "8", "--blocks", "1", "--write", "5"]
    out = run("finetune/finetune", "finetune.png", settings=settings)
    found = re.search(r"loss ([\d.]+) -> ([\d.]+)\n$", out)
    assert found
    assert float(found[2]) < float(found[1])
    assert "16,384 of 137,088 numbers were learnt" in out


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_actors_play_and_the_policy_learns(run: Callable[..., str]) -> None:
    out = run("async_rl/actors", "async_rl.png", settings=["--actors", "2", "--unrolls", "8"])
    assert re.search(r"a pole stands for \d+ -> \d+ moves\n$", out)
    assert "unroll 16/16" in out


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_bar_in_a_terminal(tmp_path: Path) -> None:
    """In a terminal the bar is rich's; without rich and matplotlib the program runs, and says what it lacks."""
    program = "from showing import Bar\nwith Bar(3) as bar:\n    bar.show(3, 'loss 0.1')\n"
    ours, theirs = pty.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        command = [sys.executable, "-c", program]
        subprocess.run(command, stdout=theirs, env=environment, cwd=EXAMPLES, check=True, timeout=150)
        shown = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "3/3" in shown and "━" in shown and "loss 0.1" in shown
    for module in ("rich", "matplotlib"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')")
    bare = program + "from showing import picture\nfrom pathlib import Path\npicture(Path('x.png'), print)\n"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", bare]
    out = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=EXAMPLES, check=True).stdout
    assert out.startswith("step 3/3  loss 0.1") and "pip install 'telegrad[demo]'" in out


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_has_its_line_and_its_length(name: str) -> None:
    assert f"[`{name}.py`]" in (EXAMPLES / "README.md").read_text()
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 150
    assert name in SETTINGS


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_parties_that_do_not_trust_each_other(run: Callable[..., str]) -> None:
    pytest.importorskip("cryptography")
    settings = ["--steps", "40", "--clip", "8", "--noise", "0.05"]
    out = run("hospital/run", "hospital.png", settings=settings)
    found = re.search(r"accuracy ([\d.]+)% -> ([\d.]+)%", out)
    assert found
    assert float(found[2]) > 70
    assert "float32 x 2d" in out  # activations and gradients
    assert "int64" not in out  # labels do not cross
    assert "refusal" not in out


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_two_parties_in_two_networks(run: Callable[..., str]) -> None:
    pytest.importorskip("cryptography")
    settings = ["--namespaces", "--steps", "40", "--clip", "8", "--noise", "0.05", "--gradient-noise", "0.01"]
    out = run("hospital/run", "hospital.png", settings=settings)
    assert re.search(r"accuracy [\d.]+% -> [\d.]+%", out)
    assert "float32 x 2d" in out and "int64" not in out and "refusal" not in out
