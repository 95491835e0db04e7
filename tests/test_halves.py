"""`make test` runs every test file, each once, whatever folders there will be."""

from pathlib import Path

from tests.halves import FIRST, FOLDER, halves


def files_in(places: list[str]) -> list[Path]:
    return [file for place in map(Path, places) for file in (place.rglob("test_*.py") if place.is_dir() else [place])]


def test_each_file_is_in_one_half() -> None:
    first, second = map(files_in, halves())
    assert sorted(first + second) == sorted(FOLDER.rglob("test_*.py"))


def test_what_is_named_is_there() -> None:
    assert [name for name in FIRST if not (FOLDER / name).is_dir()] == []
