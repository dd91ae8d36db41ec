"""Captures of the reference pipeline, and what tests do to them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from coreai_rgba_image.host.gates.oracle import Oracle, Request, capture

SETTINGS: dict[str, dict[str, Any]] = {
    "square": {"steps": 3},
    "guided, not square": {
        "width": 192, "height": 128, "steps": 4, "seed": 2**64 - 1, "negative_prompt": "", "cfg": 3.0,
        "prompt": "-\"it's\" a {sticker}\n🍎",
    },
    "bf16": {"width": 192, "height": 128, "steps": 3, "dtype": "bf16"},
}  # fmt: skip


@pytest.fixture(scope="session")
def captures(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    """One for each of ``SETTINGS``, not to be changed."""
    folder = tmp_path_factory.mktemp("captures")
    return {
        name: capture(Request(tiny_checkpoint, **settings), folder / f"{index}")
        for index, (name, settings) in enumerate(SETTINGS.items())
    }


@pytest.fixture(scope="session")
def guided(captures: dict[str, Oracle]) -> Oracle:
    return captures["guided, not square"]


@pytest.fixture
def copy(guided: Oracle, tmp_path: Path) -> Path:
    """A copy of the guided capture, to be changed."""
    return Path(shutil.copytree(guided.folder, tmp_path / "copy"))
