"""What the tests of host share."""

from pathlib import Path

import pytest

from .published_set import write_published


@pytest.fixture(scope="session")
def published_set(tiny_set: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny set as if it were the published one, not to be changed."""
    return write_published(tiny_set, tiny_checkpoint, tmp_path_factory.mktemp("published") / "RGBA-Image-2.1")
