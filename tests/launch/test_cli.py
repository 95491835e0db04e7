"""The command line: what it accepts, and what the doctor says."""

import pytest

from telegrad.cli import doctor, main


def test_doctor_looks_at_everything_and_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for what in ("Python", "torch", "Unix sockets", "TCP, loopback", "shared memory", "open files", "clock"):
        assert f"  {what} " in out


def test_what_is_missing_is_said_with_what_to_do() -> None:
    findings = [doctor.Finding("Python", "3.9", "install a newer one", fatal=True), doctor.Finding("torch", "2.13")]
    assert doctor.report(findings).splitlines() == [
        "FAIL  Python  3.9",
        "              -> install a newer one",
        "  ok  torch   2.13",
        "",
        "1 of 2 checks have something to say.",
    ]


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _unix_sockets() -> doctor.Finding:
        raise PermissionError("not allowed")

    monkeypatch.setattr(doctor, "CHECKS", (_unix_sockets,))
    assert doctor.examine() == [doctor.Finding("unix sockets", "PermissionError: not allowed", "not available here")]


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "-n", "0", "x.py"], ["nonsense"]])
def test_mistakes_are_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: telegrad" in capsys.readouterr().err
