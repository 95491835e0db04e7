"""Every example runs as a user would run it, on small settings, and learns."""

import re
import subprocess
import sys
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
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.stem.endswith("_picture"))


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *SETTINGS[name], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["rnn", "pipeline", "sharded_embedding", "maml"])
def test_the_loss_falls(name: str) -> None:
    found = re.search(r"loss ([\d.]+) -> ([\d.]+)\n$", run(name))
    assert found
    assert float(found[2]) < float(found[1])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_parameter_server_finds_the_weights() -> None:
    found = re.search(r"largest error of a weight: ([\d.]+)", run("parameter_server"))
    assert found
    assert float(found[1]) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_generator_finds_the_circle() -> None:
    found = re.search(r"distance to the circle ([\d.]+) -> ([\d.]+)", run("wgan_gp"))
    assert found
    assert float(found[2]) < 0.7 * float(found[1])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_agent_gets_somewhere() -> None:
    assert re.search(r"mean return -?[\d.]+ -> -?[\d.]+ \(best possible 0\.92\)", run("reinforcement"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_parties_learn_together() -> None:
    found = re.search(r"accuracy ([\d.]+)% -> ([\d.]+)%", run("split_learning"))
    assert found
    assert float(found[2]) > 70


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_learns_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    out = run("demo", "--output", str(tmp_path))
    assert float(re.findall(r"held-out ([\d.]+)%", out)[-1]) > 85
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    page = (tmp_path / "demo.html").read_text()
    assert "<svg" in page and "<h1>" in page and "0.00 ms" not in page
    assert (tmp_path / "timeline.json").exists()
    for worker in ("trainer", "stem", "trunk", "server"):
        assert worker in page


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_survives_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    out = run("survive", "--output", str(tmp_path / "loss.png"))
    assert "2 deaths; every bit as in an undisturbed run: True" in out
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_has_its_line_and_its_length(name: str) -> None:
    assert f"[`{name}.py`]" in (EXAMPLES / "README.md").read_text()
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 150
    assert name in SETTINGS


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_parties_that_do_not_trust_each_other() -> None:
    pytest.importorskip("cryptography")
    command = [sys.executable, str(EXAMPLES / "hospital/run.py"), "--steps", "40", "--clip", "8", "--noise", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy ([\d.]+)% -> ([\d.]+)%", done.stdout)
    assert found
    assert float(found[2]) > 70
    assert "float32 x 2d" in done.stdout  # activations and gradients
    assert "int64" not in done.stdout  # labels do not cross
    assert "refusal" not in done.stdout
