"""Gets the newest frontend of ComfyUI to test in and prints its folder: ``python get_frontend.py``.

A server shows it with ``--front-end-root FOLDER``; the frontend that ComfyUI itself requires is left as it is.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "1.58.1"
"""The newest on PyPI when these tests were last looked at. What this names is all there is to change."""

CACHE = Path(__file__).parents[2] / ".cache"
INSIDE = "comfyui_frontend_package/static/"


def get_frontend() -> Path:
    """The folder of the frontend's page."""
    folder = CACHE / f"frontend-{VERSION}"
    if not folder.is_dir():
        _unpack(folder)
    return folder


def _unpack(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".frontend-") as name:
        temporary = Path(name)
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--dest", name, f"comfyui-frontend-package=={VERSION}"]
        subprocess.run(command, check=True, stdout=sys.stderr)  # standard output is the folder's name
        [wheel] = temporary.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            entries = [entry for entry in archive.namelist() if entry.startswith(INSIDE) and not entry.endswith(".map")]
            archive.extractall(temporary, entries)
        (temporary / INSIDE).rename(folder)


if __name__ == "__main__":
    print(get_frontend())
