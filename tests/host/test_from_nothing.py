"""From an empty folder to a picture, a command each: the trained model served as if it were the published one."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.pipeline import generate
from coreai_rgba_image.host.published import PUBLISHED_REPOSITORY
from coreai_rgba_image.host.sampling import Settings

from . import stand_in
from .hub_server import HubServer

PROMPT = "a large red star sticker, transparent background"
ONLY_SIZE = "qi21_vae_256_fp32.aimodel"
LICENCE = "Research only.\n"

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The set that ships, with one decoder, because compiling takes its time."""
    folder = tmp_path / "repository"
    others = {path.name for path in EMBEDDED_FOLDER.glob("qi21_vae_*")} - {ONLY_SIZE}
    shutil.copytree(EMBEDDED_FOLDER, folder, ignore=shutil.ignore_patterns(*others))
    for name in ("LICENSE", "NOTICE"):
        (folder / name).write_text(LICENCE, encoding="utf-8")
    return folder


@pytest.fixture
def mac(tmp_path: Path, repository: Path) -> Iterator[Command]:
    """Runs ``coreai-rgba`` on a Mac that reaches a hub with the published set, and whose models folder is empty."""
    models = tmp_path / "models"
    models.mkdir()
    with HubServer(repository, PUBLISHED_REPOSITORY) as hub:
        own = {
            "COREAI_RGBA_MODELS": str(models),
            "COREAI_RGBA_CACHE": str(tmp_path / "cache"),
            "HF_HOME": str(tmp_path),
        }
        environment = stand_in.environment(tmp_path / "mac") | hub.environment | own

        def command(*arguments: str) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, str(stand_in.AS_A_MAC), *arguments]
            return subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)

        yield command


@pytest.mark.slow
def test_download_compile_generate(mac: Command, tmp_path: Path) -> None:
    refused = mac("download")
    assert refused.returncode == 1
    assert LICENCE.strip() in refused.stdout + refused.stderr
    assert "coreai-rgba download RGBA-Image-2.1" in refused.stderr
    assert list((tmp_path / "models").iterdir()) == []

    downloaded = mac("download", "--accept-license")
    assert downloaded.returncode == 0, downloaded.stderr
    assert "coreai-rgba compile RGBA-Image-2.1" in downloaded.stdout

    drawing = ("generate", PROMPT, "--model", "RGBA-Image-2.1", "--steps", "3", "--seed", "7", "-o", "star.png")
    too_early = mac(*drawing)
    assert too_early.returncode == 1
    assert "coreai-rgba compile RGBA-Image-2.1" in too_early.stderr.replace(f"{tmp_path / 'models'}/", "")

    compiled = mac("compile", "RGBA-Image-2.1")
    assert compiled.returncode == 0, compiled.stderr
    assert [call[:2] for call in stand_in.calls(tmp_path / "mac")] == [["coreai-build", "compile"]] * 3

    drawn = mac(*drawing)
    assert drawn.returncode == 0, drawn.stderr
    expected = generate(ModelSet(EMBEDDED_FOLDER), PROMPT, 256, 256, Settings(steps=3), seed=7)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "star.png")), expected)
