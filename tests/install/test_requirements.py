"""What installing changes in an environment that is in use, on every platform: asked of uv, which resolves for any."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.version import Version

from ..project_files import ROOT

IN_USE = {
    "huggingface-hub": "0.36.0",
    "numpy": "1.26.4",
    "pillow": "10.4.0",
    "psutil": "5.9.8",
    "tokenizers": "0.20.3",
    "torch": "2.6.0",
    "torchvision": "0.21.0",
    "tqdm": "4.66.4",
    "transformers": "4.46.3",
}
"""A ComfyUI environment as it was in 2024."""

NEEDED_BY_CORE_AI = {"ml-dtypes", "typing-extensions", "yuvio"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

NO_CORE_AI = ("x86_64-pc-windows-msvc", "x86_64-apple-darwin", "aarch64-unknown-linux-gnu")
MACOS_26 = ("aarch64-apple-darwin", {"MACOSX_DEPLOYMENT_TARGET": "26.0"})
LINUX = ("x86_64-manylinux_2_34", {})
MACOS_15 = ("aarch64-apple-darwin", {"MACOSX_DEPLOYMENT_TARGET": "15.0"})
OLD_LINUX = ("x86_64-manylinux_2_28", {})


Completed = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def in_use(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("in-use"), IN_USE)


def make_environment(folder: Path, packages: Mapping[str, str]) -> Path:
    """An environment that holds these packages: their metadata, which is all that a resolver looks at."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [installed] = folder.glob("lib/python*/site-packages")
    for name, version in packages.items():
        metadata = installed / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (metadata / "METADATA").write_text(about, encoding="utf-8")
        (metadata / "RECORD").write_text("", encoding="utf-8")
    return folder


def install(environment: Path, platform: str, python: str, *what: str, **variables: str) -> Completed:
    """What uv would do, as a finished process."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--output-format", "json"]
    command += ["--python", str(environment / "bin" / "python"), "--python-platform", platform]
    command += ["--python-version", python, *(what or ("-r", str(ROOT / "requirements.txt")))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})


def changes(environment: Path, platform: str, python: str, *what: str, **variables: str) -> tuple[set[str], dict]:
    """The names that would go, and what would come, by name."""
    done = install(environment, platform, python, *what, **variables)
    assert done.returncode == 0, done.stderr
    changes = json.loads(done.stdout)["changes"]
    assert {change["action"] for change in changes} <= {"installed", "uninstalled"}
    return (
        {change["name"] for change in changes if change["action"] == "uninstalled"},
        {change["name"]: Version(change["version"]) for change in changes if change["action"] == "installed"},
    )


def test_where_core_ai_is_not_to_be_had_nothing_changes(in_use: Path) -> None:
    found = {(platform, python): changes(in_use, platform, python) for platform in NO_CORE_AI for python in PYTHONS}
    assert {case: change for case, change in found.items() if change != (set(), {})} == {}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("platform", "variables"), [MACOS_26, LINUX], ids=["macos26", "linux"])
def test_where_it_is_only_numpy_rises(in_use: Path, platform: str, variables: dict[str, str], python: str) -> None:
    gone, come = changes(in_use, platform, python, **variables)
    assert gone == {"numpy"}
    assert come.keys() == {"coreai-core", "numpy"} | NEEDED_BY_CORE_AI
    assert come["numpy"] >= Version("2.3")


def test_a_numpy_that_suffices_stays(tmp_path: Path) -> None:
    in_use = make_environment(tmp_path, IN_USE | {"numpy": "2.3.0"})
    for platform, variables in (MACOS_26, LINUX):
        gone, come = changes(in_use, platform, "3.12", **variables)
        assert (gone, come.keys()) == (set(), {"coreai-core"} | NEEDED_BY_CORE_AI)


@pytest.mark.parametrize(("platform", "variables"), [MACOS_15, OLD_LINUX], ids=["macos15", "old linux"])
def test_where_its_line_fails_it_alone_fails(in_use: Path, platform: str, variables: dict[str, str]) -> None:
    """ComfyUI-Manager installs line by line. A marker cannot tell these systems from newer ones."""
    first, *others = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    done = install(in_use, platform, "3.12", first, **variables)
    assert done.returncode != 0
    assert "coreai-core" in done.stderr
    assert [line for line in others if changes(in_use, platform, "3.12", line, **variables) != (set(), {})] == []
