"""What the registry is given: checked, complete, and nothing else."""

import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from ..project_files import ROOT, tracked_files
from .conftest import STRAY, comfy

LEFT_OUT = ("tests/*", ".ci/*", "docs/*.py", ".comfyignore", ".gitattributes", ".gitignore", "Makefile")
LARGEST = 16_000_000
"""Bytes. 11 MB are the model that ships and the checkpoint it was made of."""

FORBIDDEN = """
def run(code: str) -> None:
    exec(code); print(eval(code))
"""


def names(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as content:
        return set(content.namelist())


def test_the_registrys_checks_have_nothing_to_say(checkout: Path) -> None:
    said = comfy(checkout, "validate")
    assert "All validation checks passed" in said
    assert "warning" not in said.lower()


def test_what_the_registry_only_warns_of_is_an_error_here() -> None:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--output-format",
        "concise",
        "--stdin-filename",
        "nodes/x.py",
        "-",
    ]
    done = subprocess.run(command, cwd=ROOT, input=FORBIDDEN, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [rule for rule in ("S102", "S307", "E702") if rule not in done.stdout] == []


def test_the_archive_holds_the_pack_and_nothing_else(archive: Path) -> None:
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files()}
    wanted = {name for name in tracked if not any(fnmatch(name, pattern) for pattern in LEFT_OUT)}
    assert names(archive) == wanted
    assert not names(archive) & set(STRAY)


def test_the_archive_holds_what_comfyui_and_its_manager_look_for(archive: Path) -> None:
    shipped = "host/demo/data/model_set"
    needed = {
        "__init__.py", "pyproject.toml", "requirements.txt", "README.md", "CHANGELOG.md", "LICENSE",
        "nodes/comfy.py", "host/pipeline.py", "web/coreai_rgba.js",
        "example_workflows/sticker.json", "example_workflows/sticker.jpg", "example_workflows/api/sticker.json",
        "example_workflows/api/client.py", "web/docs/CoreAIModel.md", "web/docs/CoreAIModel/ja.md",
        "web/docs/model-samplers.png", "locales/zh/nodeDefs.json",
        f"{shipped}/qi21_dit_full_w16a32_dyn_iofp32.aimodel/main.mlirb", f"{shipped}/tokenizer/tokenizer.json",
        "host/demo/data/LICENSE",
    }  # fmt: skip
    assert needed - names(archive) == set()


def test_the_archive_is_small(archive: Path) -> None:
    assert archive.stat().st_size < LARGEST
