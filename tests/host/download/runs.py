"""What the tests of downloads ask for, and how they look at what came of it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coreai_rgba_image.host.download import NAME
from coreai_rgba_image.host.published import DOWNLOAD_RECORD

CHILD = Path(__file__).parents[1] / "children" / "download_commands.py"
REPOSITORY = "somebody/a-model-set"
DIT = "qi21_dit_full_w16a32_dyn_iofp32.aimodel"
VAE = "qi21_vae_256_fp32.aimodel"
PROGRAM = f"{DIT}/main.mlirb"
LICENCE = "You may do research with this.\n"
SECONDS = 60

Run = Callable[..., tuple[int, str, str]]
"""A command's exit status, output, and what it said on standard error."""


def arguments_for(models: Path, *more: str) -> list[str]:
    return ["download", "--repo", REPOSITORY, "--to", str(models), "--accept-license", *more]


def command_for(models: Path) -> str:
    """What a message tells to run."""
    return f"coreai-rgba download {NAME} --to {models} --repo {REPOSITORY} --accept-license"


def process(environment: dict[str, str], arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, CHILD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, **options,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that belongs to a set, by name."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and path.name not in (".gitattributes", DOWNLOAD_RECORD)
    )
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]
