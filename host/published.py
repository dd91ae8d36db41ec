"""How the published model set is laid out, and how a copy of it is had again.

Its repository on the Hugging Face hub is a model set as it stands, and so is a snapshot of it in
the hub's own cache: ``models--owner--name/snapshots/<commit>``, links into ``blobs/``.
"""

import json
import re
import shlex
from pathlib import Path

from .contract import DIT, TEXT_ENCODER, VAE_DECODER, ContractError

PUBLISHED_REPOSITORY = "mlboydaisuke/RGBA-Image-2.1-CoreAI"
PUBLISHED_FILE = Path("host", "host_contract.md")
"""The published set has it, an exported one does not."""

DOWNLOAD_RECORD = "download.json"
"""In a set that ``coreai-rgba download`` fetched: where it is from."""

PUBLISHED_SETTINGS = (
    "base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift", "shift_terminal", "time_shift_type",
    "num_train_timesteps", "steps",
)  # fmt: skip
"""What the published ``host/scheduler.json`` says."""

PUBLISHED_BUNDLES = {"qi21_encoder_": TEXT_ENCODER.kind, "qi21_dit_": DIT.kind, "qi21_vae_": VAE_DECODER.kind}
"""How the published bundles' names begin. A name is a guess: what a bundle is, its graph says."""

PUBLISHED_SIZES = tuple(f"vae --size {size}x{size}" for size in (256, 512, 1024))
"""The published VAE decoders, as ``coreai-rgba export`` would be asked for them."""

HUB_FILES = {
    "encoder": ("qi21_encoder_*",),
    "dit": ("qi21_dit_*",),
    "vae": ("qi21_vae_*",),
    "host": ("host/*", "tokenizer/*", "config.json", "LICENSE", "NOTICE"),
}
"""The files of each part, as patterns of ``hf download``."""

HUB_FOLDERS = {"blobs", "snapshots"}
"""What a repository in the Hugging Face cache consists of, beside ``refs``."""


class ModelSetError(ContractError):
    """Something in a model set is missing or wrong; ``command`` makes it anew."""

    def __init__(self, problem: str, folder: Path, part: str):
        self.problem = problem
        self.command = command_for(folder, part)
        way = "get it again" if _can_be_downloaded(folder, part) else "make it from the checkpoint"
        super().__init__(f"{problem}. To {way}: {self.command}")


def kind_by_name(name: str) -> str | None:
    """What a bundle would be if it were published under this name; None for any other name."""
    return next((kind for prefix, kind in PUBLISHED_BUNDLES.items() if name.startswith(prefix)), None)


def looks_published(folder: Path) -> bool:
    """Whether the set is a copy of the published repository, or of one laid out like it."""
    return (folder / PUBLISHED_FILE).is_file() or (folder / DOWNLOAD_RECORD).is_file()


def command_for(folder: Path, part: str) -> str:
    """The command that makes ``part`` of a set: a download of the published one, an export of any other."""
    if not _can_be_downloaded(folder, part):
        return f"coreai-rgba export --checkpoint CHECKPOINT --out {shlex.quote(str(folder))} {part}"
    real = folder.resolve()
    if real.parent.name == "snapshots":  # the hub's own tool looks after its cache
        patterns = [word for pattern in HUB_FILES.get(part.split()[0], ()) for word in ("--include", pattern)]
        cache, name = str(real.parents[2]), hub_name(real.parents[1].name)
        return shlex.join(["hf", "download", name, "--cache-dir", cache, *patterns, "--force-download"])
    source = _downloaded_from(folder)
    other = [] if source == PUBLISHED_REPOSITORY else ["--repo", source]
    return shlex.join(["coreai-rgba", "download", folder.name, "--to", str(folder.parent), *other, "--accept-license"])


def _can_be_downloaded(folder: Path, part: str) -> bool:
    return looks_published(folder) and (" " not in part or part in PUBLISHED_SIZES)


def _downloaded_from(folder: Path) -> str:
    try:
        return str(json.loads((folder / DOWNLOAD_RECORD).read_text(encoding="utf-8"))["repository"])
    except (OSError, ValueError, KeyError, TypeError):  # fetched by other means, or the record was damaged
        return PUBLISHED_REPOSITORY


def hub_name(folder_name: str) -> str:
    """``models--owner--name``, as the Hugging Face cache has it, to ``owner/name``; any other name stays."""
    found = re.fullmatch(r"models--(.+)", folder_name)
    return found[1].replace("--", "/") if found else folder_name


def hub_snapshot(folder: Path) -> Path:
    """Of a repository in the Hugging Face cache the snapshot of ``main``, else the newest; else ``folder`` itself."""
    if not all((folder / name).is_dir() for name in HUB_FOLDERS):
        return folder
    try:
        present = {path.name: path for path in (folder / "snapshots").iterdir() if path.is_dir()}
        newest = max(present.values(), key=lambda path: path.stat().st_mtime, default=folder)
        main = folder / "refs" / "main"
        return present.get(main.read_text(encoding="utf-8").strip(), newest) if main.is_file() else newest
    except OSError:  # of someone else, or its disk was unplugged: whoever reads it will be told
        return folder
