"""The tiny set as if it were the published one, and the places where people keep such a set."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from coreai_rgba_image.host.bundle import METADATA_KEY
from coreai_rgba_image.host.export.checkpoint import load_dit
from coreai_rgba_image.host.export.convert import convert
from coreai_rgba_image.host.export.model_set import dit_parts

REPOSITORY = "maker/Some-Image-2.1"
COMMIT = "790c92633540aa0cb11d9abf19eb46d861714758"
ENCODER = "qi21_encoder_dynL_w16a32_ids_iofp32.aimodel"
DIT = "qi21_dit_full_bf16_dyn_iofp32.aimodel"
VAES = {
    "qi21_vae_256_fp32.aimodel": "qi21_vae_256_fp32.aimodel",
    "qi21_vae_192x128_fp32.aimodel": "qi21_vae_512_fp32.aimodel",
    "qi21_vae_176x144_fp32.aimodel": "qi21_vae_1024_fp32.aimodel",
}
"""Two names promise sizes that the graphs do not have: what counts is the graph."""
SCHEDULER = {
    "base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02,
    "time_shift_type": "exponential", "num_train_timesteps": 1000, "steps": 40,
}  # fmt: skip


def write_published(tiny_set: Path, tiny_checkpoint: Path, out: Path) -> Path:
    """Five bundles of the published names, with ``main`` alone and no metadata of ours, and all that is beside them."""
    names = {ENCODER: ENCODER, **VAES}
    for name, published in names.items():
        shutil.copytree(tiny_set / name, out / published)
    main, *_ = dit_parts(load_dit(tiny_checkpoint))
    convert(*main, out / DIT, {})
    for bundle in out.glob("*.aimodel"):
        metadata = json.loads((bundle / "metadata.json").read_text(encoding="utf-8"))
        del metadata["creatorDefinedMetadata"][METADATA_KEY], metadata["creationDate"]
        (bundle / "metadata.json").write_text(json.dumps(metadata, sort_keys=True), encoding="utf-8")
    for name in ("host", "tokenizer"):
        shutil.copytree(tiny_set / name, out / name)
    shutil.copyfile(tiny_set / "config.json", out / "config.json")
    (out / "host" / "scheduler.json").write_text(json.dumps(SCHEDULER), encoding="utf-8")
    for name, text in {"host/host_contract.md": "# Contract", "LICENSE": "\nFOR RESEARCH\n", "NOTICE": "N"}.items():
        (out / name).write_text(text, encoding="utf-8")
    return out


def plain(published: Path, folder: Path) -> Path:
    return Path(shutil.copytree(published, folder / "plain"))


def linked(published: Path, folder: Path) -> Path:
    (folder / "linked").symlink_to(published, target_is_directory=True)
    return folder / "linked"


def in_hub_cache(published: Path, folder: Path) -> Path:
    """As the Hugging Face hub's tools keep it: every file a link to its content. Returns the repository's folder."""
    repository = folder / f"models--{REPOSITORY.replace('/', '--')}"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    for source in published.rglob("*"):
        if source.is_file():
            content, target = source.read_bytes(), snapshot / source.relative_to(published)
            blob = blobs / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.path.relpath(blob, target.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    (repository / "snapshots" / ("0" * 40) / DIT).mkdir(parents=True)  # an older revision
    return repository


def with_junk(published: Path, folder: Path) -> Path:
    """On a disk that is not Apple's, macOS keeps a second file beside every file; and Finder leaves its own."""
    copied = Path(shutil.copytree(published, folder / "with junk"))
    for path in [*copied.rglob("*")]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7" + bytes(60))
        if path.is_dir():
            (path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    shutil.copytree(copied, folder / "__MACOSX" / "with junk")
    return copied


LAYOUTS: dict[str, Callable[[Path, Path], Path]] = {
    "plain": plain, "a link": linked, "the hub's cache": in_hub_cache, "with junk": with_junk,
}  # fmt: skip
