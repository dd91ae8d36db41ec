"""The archive that users of the registry get, made of this checkout's files as ``comfy node publish`` makes it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ..project_files import ROOT, tracked_files

PACK = "coreai-rgba-image"
STRAY = (".venv/pip.py", ".cache/compiled/x", "out/demo.png", "host/__pycache__/rope.cpython-311.pyc", "node.zip.part")
"""What lies around in a checkout that is worked in."""


def comfy(checkout: Path, *command: str) -> str:
    """What comfy-cli prints. Its settings and its log stay out of the user's home."""
    environment = {**os.environ, "HOME": str(checkout.parent), "XDG_CONFIG_HOME": str(checkout.parent / "config")}
    done = subprocess.run(
        [sys.executable, "-m", "comfy_cli", "--skip-prompt", "--no-enable-telemetry", "node", *command],
        cwd=checkout, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git checkout of the project, with what work leaves behind."""
    folder = tmp_path_factory.mktemp("checkout") / PACK
    for path in tracked_files():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    for name in STRAY:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not the pack's", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def archive(checkout: Path) -> Path:
    comfy(checkout, "pack")
    return checkout / "node.zip"


@pytest.fixture(scope="session")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack's folder as ComfyUI-Manager lays it out from the archive."""
    folder = tmp_path_factory.mktemp("registry") / PACK
    with zipfile.ZipFile(archive) as content:
        content.extractall(folder)
    return folder
