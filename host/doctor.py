"""One page about this machine and what is installed on it, to paste into a bug report.

Each line is found out by itself: what fails says so in its own line and stops no other. The page is
Markdown, and nothing private is in it.
"""

import platform
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from . import mac
from .describe import describe
from .files import cache_folder
from .model_set import available_model_sets
from .privacy import scrubbed
from .smoke import smoke_run

PACKAGES = (
    "coreai-core", "coreai-torch", "numpy", "torch", "tokenizers", "safetensors", "pillow", "psutil", "tqdm",
    "huggingface_hub", "transformers", "diffusers",
)  # fmt: skip
NOT_NEEDED = "not needed here"


@dataclass(frozen=True)
class Page:
    """What ``coreai-rgba doctor`` prints; ``works`` if the smoke run drew a picture."""

    text: str
    works: bool


def examine(folders: Sequence[Path], comfyui: Path | None, smoke: Callable[[], str] = smoke_run) -> Page:
    """The page for model sets in ``folders`` and the ComfyUI at ``comfyui``.

    ``smoke`` draws something and says how it went, or raises.
    """
    lines = ["# Core AI RGBA Image", ""]
    lines += _found({**_machine(), **_disks(folders)})
    lines += ["", "## Software", "", *_found(_software(comfyui))]
    lines += ["", "## Model sets", ""]
    try:
        lines += _sets(folders)
    except Exception as error:
        lines.append(f"- {_failed(error)}")
    works = True
    try:
        drawn = smoke()
    except Exception as error:
        drawn, works = _failed(error), False
    lines += ["", "## Smoke run", "", f"- {'works' if works else 'fails'}: {_one_line(drawn)}", ""]
    return Page(scrubbed("\n".join(lines)), works)


def _found(answers: Mapping[str, Callable[[], object]]) -> Iterator[str]:
    for label, answer in answers.items():
        try:
            yield f"- {label}: {_one_line(str(answer()))}"
        except Exception as error:
            yield f"- {label}: {_failed(error)}"


def _failed(error: Exception) -> str:
    return f"not found out, {type(error).__name__}: {_one_line(str(error))}"


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _machine() -> dict[str, Callable[[], object]]:
    return {
        "system": _system,
        "chip": lambda: mac.chip() if mac.on_mac() else _linux_chip(),
        "architecture": lambda: mac.architecture() if mac.on_mac() else NOT_NEEDED,
        "coreai-build": lambda: mac.tool_version() if mac.on_mac() else NOT_NEEDED,
        "memory": _memory,
    }


def _system() -> str:
    if mac.on_mac():
        return f"macOS {platform.mac_ver()[0]} ({mac.os_build()}), {platform.machine()}"
    return f"{platform.system()} {platform.release()}, {platform.machine()}"


def _linux_chip() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _memory() -> str:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return f"{_gb(memory.total)}, {_gb(memory.available)} available; {_gb(swap.used)} of {_gb(swap.total)} swap used"


def _disks(folders: Sequence[Path]) -> dict[str, Callable[[], object]]:
    return {
        "disk of the cache": lambda: _free(cache_folder()),
        **{f"disk of model sets {number}": partial(_free, path) for number, path in enumerate(folders, start=1)},
    }


def _free(path: Path) -> str:
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    missing = "" if there == path else ", which is not there"
    return f"{_gb(psutil.disk_usage(str(there)).free)} free for {path}{missing}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def _software(comfyui: Path | None) -> dict[str, Callable[[], object]]:
    packages = {name: partial(_version, name) for name in PACKAGES}
    return {
        "this pack": _pack_version,
        "ComfyUI": lambda: _comfyui_version(comfyui) if comfyui else "this pack is not installed in one",
        "Python": lambda: f"{platform.python_version()}, {platform.python_implementation()}, {sys.executable}",
        **packages,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _pack_version() -> str:
    """Inside ComfyUI the pack is a folder, not an installed package."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return version("coreai-rgba-image")


def _comfyui_version(folder: Path) -> str:
    text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    [found] = re.findall(r'__version__ = "(.+)"', text)
    return str(found)


def _sets(folders: Sequence[Path]) -> Iterator[str]:
    for name, model in available_model_sets(folders).items():
        yield f"- {_one_line(name)}: {_one_line(str(model.path))}"
        try:
            yield from (f"  - {_one_line(line)}" for line in describe(name, model).lines())
        except Exception as error:
            yield f"  - {_failed(error)}"
