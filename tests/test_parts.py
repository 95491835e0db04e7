"""`make test` runs every test file, in exactly one of the parts."""

from pathlib import Path

import pytest

from tests.parts import FIRST, FOLDER, SECOND, parts


def files_in(part: list[str]) -> set[Path]:
    return {file for path in map(Path, part) for file in ([path] if path.is_file() else path.rglob("test_*.py"))}


@pytest.mark.parametrize("cores", [1, 2, 7, 8, 16, 64])
def test_every_file_is_in_one_part(cores: int) -> None:
    found = [files_in(part) for part in parts(cores)]
    assert all(found)
    assert set().union(*found) == set(FOLDER.rglob("test_*.py"))
    assert sum(map(len, found)) == len(set().union(*found))


def test_the_folders_that_are_named_exist() -> None:
    assert all((FOLDER / name).is_dir() for name in (*FIRST, *SECOND))
