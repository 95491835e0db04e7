"""The files that documents, docstrings and comments name are there: a move takes the words along."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "telegrad"
PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")]
ROOMS = [*[p.name for p in SOURCE.iterdir() if p.is_dir()], *[p.name for p in (SOURCE / "rpc").iterdir() if p.is_dir()]]

IN_A_PAGE = re.compile(rf"`(?:src/)?(?:telegrad/)?((?:{'|'.join(ROOMS)}|tests|benchmarks|examples)/[\w/]*(?:\.py)?)`")
IN_SOURCE = re.compile(r"`([\w/]+\.py)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
A_USERS = {"conftest.py", "script.py", "train.py"}


def test_links_lead_somewhere() -> None:
    dead = [(page.name, link) for page in PAGES for link in LINK.findall(page.read_text())]
    assert [(page, link) for page, link in dead if not _is_there(page, link)] == []


def _is_there(page: str, link: str) -> bool:
    return any((each.parent / link).exists() for each in PAGES if each.name == page)


def test_pages_name_files_that_exist() -> None:
    named = {(page.name, path) for page in PAGES for path in IN_A_PAGE.findall(page.read_text())}
    places = (SOURCE, SOURCE / "rpc", ROOT)
    assert [(page, path) for page, path in named if not any((place / path).exists() for place in places)] == []


def test_source_names_files_that_exist() -> None:
    missing = []
    for file in SOURCE.rglob("*.py"):
        for path in IN_SOURCE.findall(file.read_text()):
            places = (file.parent, file.parent.parent, SOURCE, ROOT)
            if path not in A_USERS and not any((place / path).exists() for place in places):
                missing.append((str(file.relative_to(ROOT)), path))
    assert missing == []
