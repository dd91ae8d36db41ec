"""The archive from the registry, unpacked where nothing may be written, in a real ComfyUI; and other Pythons."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..comfyui.get_comfyui import get_comfyui
from ..comfyui.server import PACK, Client, make_base, running_server
from ..project_files import ROOT

STICKER = ROOT / "example_workflows" / "api" / "sticker.json"
SAMPLER, SAVE = "3", "5"


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody can write into ``folder``. Modes do not keep root from it, a mount does."""
    if os.geteuid() == 0:
        bind = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, text=True, check=False)
        if bind.returncode:
            pytest.skip(f"root may not mount here: {bind.stderr}")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
            yield
        finally:
            subprocess.run(["umount", folder], check=True)
    else:
        subprocess.run(["chmod", "-R", "a-w", folder], check=True)
        try:
            yield
        finally:
            subprocess.run(["chmod", "-R", "u+w", folder], check=True)


def cannot_write(folder: Path) -> bool:
    try:
        (folder / "written").touch()
    except OSError:
        return True
    return False


@pytest.mark.slow
def test_the_archive_runs_from_a_read_only_folder(unpacked: Path, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    pack = base / "custom_nodes" / PACK
    pack.unlink()
    shutil.copytree(unpacked, pack)
    workflow = json.loads(STICKER.read_text(encoding="utf-8"))
    workflow[SAMPLER]["inputs"]["steps"] = 1
    with read_only(pack), running_server(get_comfyui(), base) as server:
        assert cannot_write(pack)
        client = Client(server.address)
        run = client.run(workflow)
        assert run.outcome == "execution_success", server.log[-5000:]
        assert client.view(run.outputs(SAVE)[0]).startswith(b"\x89PNG")
        client.close()


def interpreter(version: str) -> str:
    """One of that version on this machine."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for path in filter(None, found):
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == version:
            return path
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_source_compiles_without_a_warning(version: str) -> None:
    sources = [ROOT / "__init__.py", *(path for folder in ("host", "nodes") for path in (ROOT / folder).rglob("*.py"))]
    code = "import sys\nfor path in sys.argv[1:]: compile(open(path, encoding='utf-8').read(), path, 'exec')"
    command = [interpreter(version), "-W", "error", "-c", code, *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
