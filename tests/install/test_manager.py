"""ComfyUI-Manager installs the pack into an environment in use: for real, and compared with what was there before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..comfyui.get_comfyui import get_comfyui
from .test_requirements import NEEDED_BY_CORE_AI, make_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere coreai-core may be missing, which is right"),
]

MANAGER = "comfyui-manager==4.3"
IN_USE = ("numpy==2.2.*", "pillow==11.*", "psutil==6.*", "tqdm==4.66.*", "transformers==4.57.*", "aiohttp", "pyyaml")
NOT_TO_TOUCH = {"torch": "2.6.0", "torchvision": "0.21.0", "torchaudio": "2.6.0", "comfyui-frontend-package": "1.32.9"}
"""By their metadata alone, being large. The Manager puts back the last two of them if they are missing."""


def installed(environment: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "uv", "pip", "freeze", "--python", str(environment / "bin" / "python")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return dict(line.split("==") for line in lines)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Manager and packages older than the newest, as a ComfyUI of last year has them."""
    folder = make_environment(tmp_path_factory.mktemp("environment"), NOT_TO_TOUCH)
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    subprocess.run([*command, "pip", MANAGER, *IN_USE], check=True)
    return folder


def test_post_install_changes_nothing_but_numpy(environment: Path, unpacked: Path, tmp_path: Path) -> None:
    comfyui = tmp_path / "ComfyUI"  # a copy, as the Manager writes into it
    shutil.copytree(get_comfyui(), comfyui, ignore=shutil.ignore_patterns("models", "custom_nodes", "output"))
    (comfyui / "custom_nodes").mkdir()
    before = installed(environment)
    done = subprocess.run(
        [environment / "bin" / "python", "-m", "cm_cli", "post-install", unpacked],
        cwd=tmp_path, env={**os.environ, "COMFYUI_PATH": str(comfyui), "PIP_NO_COMPILE": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stdout + done.stderr
    after = installed(environment)
    assert {name for name in before if after.get(name) != before[name]} == {"numpy"}
    assert after.keys() - before.keys() <= {"coreai-core"} | NEEDED_BY_CORE_AI
    assert "coreai-core" in after
