"""Every node has a help page, and its pictures are there: what needs no ComfyUI to be seen."""

import re
from pathlib import Path

import pytest

from .project_files import ROOT

FOLDER = ROOT / "web" / "docs"
NODES = sorted(
    name
    for path in (ROOT / "nodes").glob("*.py")
    for name in re.findall(r'node_id="(\w+)"', path.read_text(encoding="utf-8"))
)
PAGES = sorted(FOLDER.rglob("*.md"))
LARGEST, LARGEST_TOGETHER = 150_000, 700_000
"""Bytes of one picture, and of all."""


def shown(page: Path) -> set[str]:
    """The pictures that a page shows. The browser looks for them beside the English pages, whatever the language."""
    return set(re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8")))


def test_each_node_has_a_page_and_each_page_a_node() -> None:
    assert len(NODES) > 5
    assert sorted(path.stem for path in FOLDER.glob("*.md")) == NODES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(FOLDER).as_posix())
def test_a_page_shows_a_picture_and_all_it_shows_is_there(page: Path) -> None:
    assert shown(page)
    assert [name for name in shown(page) if not (FOLDER / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(FOLDER).as_posix())
def test_a_page_links_to_nothing(page: Path) -> None:
    """A link would leave ComfyUI, or lead nowhere."""
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?<!!)\[[^\]]*\]\([^)]*\)|https?:", text) == []


def test_each_picture_is_shown_and_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.suffix in (".png", ".jpg")}
    assert set(files) == set().union(*map(shown, FOLDER.glob("*.md")))
    assert max(files.values()) < LARGEST
    assert sum(files.values()) < LARGEST_TOGETHER


def test_every_picture_is_drawn_by_the_script() -> None:
    script = (ROOT / "docs" / "help.py").read_text(encoding="utf-8")
    assert [path.name for path in FOLDER.glob("*.png") if f'"{path.stem}": ' not in script] == []
