"""Finding model sets and telling what each holds.

A model set is one folder with the bundles of one model, its ``tokenizer/`` and its ``host/``, laid
out as the published RGBA-Image-2.1 set is. Listing only looks at names and times, so a menu can
ask for it often; bundles are opened when a set is used.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .bundle import SUFFIX, Bundle, read_bundle
from .contract import DIT, PIXELS_PER_TOKEN, TEXT_ENCODER, VAE_DECODER, ContractError
from .latents import QWEN_IMAGE_21, LatentStatistics
from .prompt import PromptTokenizer
from .rope import AxisTables, read_axis_tables
from .schedule import SchedulerConfig

EMBEDDED_NAME = "demo"
EMBEDDED_FOLDER = Path(__file__).parent / "demo" / "data" / "model_set"
"""The small trained model that comes with the pack: works anywhere the runtime does, without a download."""


@dataclass(frozen=True)
class ModelSet:
    """One model set. Everything is read when asked for, and raises ``ContractError`` if it is missing."""

    path: Path

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        return tuple(read_bundle(path) for path in bundle_paths(self.path))

    @property
    def text_encoder(self) -> Bundle:
        return self._only(TEXT_ENCODER.kind, "encoder")

    @property
    def dit(self) -> Bundle:
        return self._only(DIT.kind, "dit")

    def _only(self, kind: str, part: str) -> Bundle:
        found = [bundle for bundle in self.bundles if bundle.spec.kind == kind]
        if len(found) == 1:
            return found[0]
        if found:
            raise ContractError(
                f"{self.path} holds {len(found)} {kind} bundles, {[b.path.name for b in found]}: keep one"
            )
        raise ContractError(f"{self.path} holds no {kind} bundle. {export_advice(self.path, part)}")

    @property
    def vae_decoders(self) -> dict[tuple[int, int], Bundle]:
        """VAE decoder bundles by the (height, width) of their picture in pixels."""
        sized = {}
        for bundle in self.bundles:
            if bundle.spec.kind == VAE_DECODER.kind:
                _, _, height, width = bundle.spec.output("image").shape
                sized[int(height), int(width)] = bundle
        return dict(sorted(sized.items()))

    def vae_decoder(self, height: int, width: int) -> Bundle:
        """The VAE decoder for a grid of ``height`` x ``width`` latent tokens."""
        pixels = (height * PIXELS_PER_TOKEN, width * PIXELS_PER_TOKEN)
        decoders = self.vae_decoders
        if pixels in decoders:
            return decoders[pixels]
        size = f"{pixels[1]}x{pixels[0]}"
        sizes = ", ".join(f"{w}x{h}" for h, w in decoders) or "none"
        raise ContractError(
            f"no VAE decoder for {size} pixels in {self.path}; it has: {sizes}. Choose one of these sizes. "
            f"{export_advice(self.path, f'vae --size {size}')}"
        )

    @property
    def tokenizer(self) -> PromptTokenizer:
        return PromptTokenizer.from_file(self.path / "tokenizer")

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """``host/scheduler.json``, or this model's own settings in a set without one."""
        path = self.path / "host" / "scheduler.json"
        return SchedulerConfig.from_file(path) if path.exists() else SchedulerConfig()

    @property
    def rope_tables(self) -> AxisTables | None:
        return read_axis_tables(self.path / "host")

    @property
    def latent_statistics(self) -> LatentStatistics:
        """From the metadata of a VAE bundle; the published bundles carry none and are Qwen-Image-2.1's."""
        for bundle in self.vae_decoders.values():
            if "latents_mean" in bundle.metadata:
                return LatentStatistics.from_lists(bundle.metadata["latents_mean"], bundle.metadata.get("latents_std"))
        return QWEN_IMAGE_21

    def report(self) -> list[str]:
        """What the set holds, a line each; for what is missing, the command that makes it."""
        try:
            held = ", ".join(f"{bundle.path.name} ({bundle.size / 1e6:,.1f} MB)" for bundle in self.bundles)
        except ContractError as error:
            return [str(error)]
        sizes = ", ".join(f"{width}x{height}" for height, width in self.vae_decoders)
        return [
            f"bundles: {held or 'none'}",
            *_complaints(
                lambda: self.text_encoder, lambda: self.dit, lambda: self.tokenizer, lambda: self.scheduler_config
            ),
            f"sizes: {sizes}" if sizes else f"no VAE decoder. {export_advice(self.path, 'vae')}",
        ]

    @property
    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        """Changes when any file of the set does: name, size and modification time of each."""
        return tuple(sorted(_files(self.path)))


def _complaints(*parts: Callable[[], object]) -> Iterator[str]:
    for part in parts:
        try:
            part()
        except ContractError as error:
            yield str(error)


def export_advice(path: Path, part: str) -> str:
    return f"To make it from the checkpoint: coreai-rgba export --checkpoint CHECKPOINT --out '{path}' {part}"


def bundle_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in (*bundle_paths(folder), folder / "tokenizer", folder / "host"):
        if path.is_dir():
            for entry in os.scandir(path):
                status = entry.stat()
                yield f"{path.name}/{entry.name}", status.st_size, status.st_mtime_ns


def available_model_sets(folders: Iterable[str | Path]) -> dict[str, ModelSet]:
    """The model sets below ``folders``, and last the one that comes with the pack."""
    found = find_model_sets(folders)
    found.pop(EMBEDDED_NAME, None)
    return {**found, EMBEDDED_NAME: ModelSet(EMBEDDED_FOLDER)}


def find_model_sets(folders: Iterable[str | Path]) -> dict[str, ModelSet]:
    """Model sets below ``folders`` by their "/"-joined name relative to the folder; the first of a name wins.

    Symlinks are followed. Bundles are not looked into, so their number costs little.
    """
    found: dict[str, ModelSet] = {}
    for folder in folders:
        for path in _walk(Path(folder), frozenset()):
            found.setdefault(path.relative_to(folder).as_posix(), ModelSet(path))
    found.pop(".", None)  # bundles loose in the folder itself have no name
    return dict(sorted(found.items()))


def _walk(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in above:  # a symlink back up
        return
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:  # an unplugged disk or a folder of someone else's: it has no sets for us
        return
    if any(entry.name.endswith(SUFFIX) for entry in entries):
        yield folder
    for entry in entries:
        if not entry.name.endswith((SUFFIX, ".aimodelc")):
            yield from _walk(Path(entry.path), above | {real})


def choose_model_set(name: str, sets: dict[str, ModelSet]) -> ModelSet:
    """The set called ``name``; only names that were found are taken, so no path can be smuggled in."""
    if name not in sets:
        raise ContractError(f"no model set is called {name!r}: there are {', '.join(map(repr, sets)) or 'none'}")
    return sets[name]
