"""Finding model sets and telling what each holds.

A model set is one folder with the bundles of one model, its ``tokenizer/`` and its ``host/``, laid
out as the published RGBA-Image-2.1 set is. Listing only looks at names and times, so a menu can
ask for it often; bundles are opened when a set is used.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .bundle import SUFFIX, Bundle, DamagedBundleError, read_bundle, reading
from .contract import DIT, LATENT_CHANNELS, PIXELS_PER_TOKEN, TEXT_ENCODER, TEXT_KV, VAE_DECODER, ContractError
from .latents import QWEN_IMAGE_21, LatentStatistics
from .preview import PREVIEW_KEY, QWEN_IMAGE_21_PREVIEW, PreviewMap
from .prompt import PromptTokenizer
from .published import (
    HUB_FOLDERS,
    PUBLISHED_SETTINGS,
    ModelSetError,
    hub_name,
    hub_snapshot,
    kind_by_name,
    looks_published,
)
from .rope import AXIS_WIDTHS, AxisTables, read_axis_tables
from .schedule import SchedulerConfig

EMBEDDED_NAME = "demo"
EMBEDDED_FOLDER = Path(__file__).parent / "demo" / "data" / "model_set"
"""The small trained model that comes with the pack: works anywhere the runtime does, without a download."""

PARTS = {TEXT_ENCODER.kind: "encoder", DIT.kind: "dit", VAE_DECODER.kind: "vae"}
"""What ``coreai-rgba export`` calls each kind of bundle."""

ARCHIVE_JUNK = "__MACOSX"
"""Where macOS puts its ``._`` copy of a folder inside a zip file."""


class DamagedPartError(ModelSetError, DamagedBundleError):
    """A bundle of a set that would kill the process if it were loaded."""


@dataclass(frozen=True)
class ModelSet:
    """One model set. Everything is read when asked for, and raises ``ContractError`` if it is missing."""

    path: Path

    @cached_property
    def contents(self) -> dict[Path, Bundle | ContractError]:
        """Every bundle by its path, or what is wrong with it: what is not used need not be whole."""
        return {self.path / name: _bundle_or_error(self.path, self.path / name) for name in self.names}

    @property
    def names(self) -> list[str]:
        """The bundles by their names, none of them opened."""
        with reading(self.path):
            return [path.name for path in bundle_paths(self.path)]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles that are whole; ``errors`` tells of the others."""
        return tuple(bundle for bundle in self.contents.values() if isinstance(bundle, Bundle))

    def errors(self, *kinds: str) -> list[ContractError]:
        """What is wrong with bundles, of those that may be of one of these kinds, or of all."""
        errors = {path: error for path, error in self.contents.items() if isinstance(error, ContractError)}
        return [error for path, error in errors.items() if not kinds or kind_by_name(path.name) in (*kinds, None)]

    def whole(self, *kinds: str) -> list[Bundle]:
        """The bundles of these kinds, or all; raises if one that may be of them is damaged."""
        for error in self.errors(*kinds):
            raise error
        return [bundle for bundle in self.bundles if not kinds or bundle.spec.kind in kinds]

    @property
    def text_encoder(self) -> Bundle:
        return self._only(TEXT_ENCODER.kind)

    @property
    def dit(self) -> Bundle:
        bundle = self._only(DIT.kind)
        self._check_config(bundle)
        return bundle

    def _only(self, kind: str) -> Bundle:
        found = [bundle for bundle in self.bundles if bundle.spec.kind == kind]
        if len(found) == 1:
            return found[0]
        if found:
            raise ContractError(
                f"{self.path} holds {len(found)} {kind} bundles, {[b.path.name for b in found]}: keep one"
            )
        for error in self.errors(kind):
            raise error
        raise ModelSetError(f"{self.path} holds no {kind} bundle", self.path, PARTS[kind])

    @property
    def vae_decoders(self) -> dict[tuple[int, int], Bundle]:
        """VAE decoder bundles by the (height, width) of their picture in pixels."""
        sized: dict[tuple[int, int], Bundle] = {}
        for bundle in self.bundles:
            if bundle.spec.kind == VAE_DECODER.kind:
                height, width = picture_size(bundle)
                other = sized.setdefault((height, width), bundle)
                if other is not bundle:
                    raise ContractError(
                        f"{self.path} holds two VAE decoders for {width}x{height} pixels, {other.path.name} and "
                        f"{bundle.path.name}: keep one"
                    )
        return dict(sorted(sized.items()))

    def vae_decoder(self, height: int, width: int) -> Bundle:
        """The VAE decoder for a grid of ``height`` x ``width`` latent tokens."""
        pixels = (height * PIXELS_PER_TOKEN, width * PIXELS_PER_TOKEN)
        decoders = self.vae_decoders
        if pixels in decoders:
            return decoders[pixels]
        size = f"{pixels[1]}x{pixels[0]}"
        sizes = ", ".join(f"{w}x{h}" for h, w in decoders) or "none"
        unread = "".join(f". Not read: {error}" for error in self.errors(VAE_DECODER.kind))
        raise ModelSetError(
            f"no VAE decoder for {size} pixels in {self.path}; it has: {sizes}. Choose one of these sizes, or draw "
            f"it from tiles: 'tiled' in Core AI RGBA Decode, --tiled on the command line{unread}",
            self.path, f"vae --size {size}",
        )  # fmt: skip

    @property
    def tokenizer(self) -> PromptTokenizer:
        with self._mended_by("host"):
            return PromptTokenizer.from_file(self.path / "tokenizer")

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """``host/scheduler.json``, or this model's own settings in a set without one.

        That of the published set says everything; a file written by hand may name what differs.
        """
        path = self.path / "host" / "scheduler.json"
        with self._mended_by("host"):
            if not path.exists():
                return SchedulerConfig()
            config = SchedulerConfig.from_file(path)
            lacking = [name for name in PUBLISHED_SETTINGS if name not in _read_json(path)]
            if lacking and looks_published(self.path):
                raise ContractError(f"{path} lacks {', '.join(lacking)}, which the published one has: it was changed")
            return config

    @property
    def rope_tables(self) -> AxisTables | None:
        with self._mended_by("host"):
            return read_axis_tables(self.path / "host")

    @property
    def latent_statistics(self) -> LatentStatistics:
        """From the metadata of a VAE bundle; the published bundles carry none and are Qwen-Image-2.1's."""
        for bundle in self.vae_decoders.values():
            if "latents_mean" in bundle.metadata:
                return LatentStatistics.from_lists(bundle.metadata["latents_mean"], bundle.metadata.get("latents_std"))
        return QWEN_IMAGE_21

    @property
    def preview_map(self) -> PreviewMap:
        """From the metadata of a VAE bundle; the published bundles carry none."""
        for bundle in self.vae_decoders.values():
            if PREVIEW_KEY in bundle.metadata:
                return PreviewMap.from_lists(bundle.metadata[PREVIEW_KEY])
        return QWEN_IMAGE_21_PREVIEW

    @property
    def licence(self) -> str:
        """The first line of its ``LICENSE``, empty if it has none."""
        path = self.path / "LICENSE"
        with reading(path):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        return next((line.strip() for line in lines if line.strip()), "")

    def _check_config(self, dit: Bundle) -> None:
        """Raise ``ModelSetError`` if there is a ``config.json`` and it describes another DiT."""
        path = self.path / "config.json"
        with self._mended_by("host"):
            if not path.exists():
                return
            config = _read_json(path)
            wrong = [
                f"{name} is {config.get(name)}, {dit.path.name} has {size}"
                for name, size in _sizes(dit).items()
                if config.get(name) != size
            ]
            if wrong:
                raise ContractError(f"{path} describes another model: {'; '.join(wrong)}")

    @contextmanager
    def _mended_by(self, part: str) -> Iterator[None]:
        """Adds to what is wrong with a file of the set the command that makes it anew."""
        with reading(self.path):
            list(self.path.iterdir())  # a set that is gone has no default settings
            try:
                yield
            except ContractError as error:
                raise ModelSetError(str(error), self.path, part) from error

    @property
    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        """Changes when any file of the set does: name, size and modification time of each."""
        return tuple(sorted(_files(self.path)))


def _bundle_or_error(folder: Path, path: Path) -> Bundle | ContractError:
    try:
        return read_bundle(path)
    except DamagedBundleError as error:
        return DamagedPartError(str(error), folder, PARTS.get(kind_by_name(path.name) or "", "all"))
    except ContractError as error:
        return error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ContractError(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ContractError(f"{path} holds no JSON object")
    return value


def _sizes(dit: Bundle) -> dict[str, Any]:
    """Fields of the source's ``transformer/config.json`` that the bundle's inputs and outputs tell too."""
    text_features = next(tensor for tensor in dit.spec.inputs if tensor.name == "txt_feats")
    sizes: dict[str, Any] = {
        "in_channels": LATENT_CHANNELS,
        "context_in_dim": text_features.shape[2],
        "axes_dims_rope": list(AXIS_WIDTHS),
    }
    if TEXT_KV.function in dit.functions:
        blocks, heads, _, head_size = dit.functions[TEXT_KV.function].output("txt_keys").shape
        sizes |= {"num_layers": blocks, "num_attention_heads": heads, "attention_head_dim": head_size}
    return sizes


def picture_size(vae_decoder: Bundle) -> tuple[int, int]:
    """(height, width) in pixels of what a VAE decoder draws."""
    _, _, height, width = vae_decoder.spec.output("image").shape
    return int(height), int(width)


def bundle_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Without what macOS leaves behind."""
    for path in (*bundle_paths(folder), folder / "tokenizer", folder / "host"):
        if path.is_dir():
            for file in path.iterdir():
                if not file.name.startswith("."):
                    yield f"{path.name}/{file.name}", *_stamp(file)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:  # a link that leads nowhere: it changes when it leads somewhere
        return -1, -1
    return status.st_size, status.st_mtime_ns


def available_model_sets(folders: Iterable[str | Path]) -> dict[str, ModelSet]:
    """The model sets below ``folders``, and last the one that comes with the pack."""
    found = find_model_sets(folders)
    found.pop(EMBEDDED_NAME, None)
    return {**found, EMBEDDED_NAME: ModelSet(EMBEDDED_FOLDER)}


def find_model_sets(folders: Iterable[str | Path]) -> dict[str, ModelSet]:
    """Model sets below ``folders`` by their "/"-joined name relative to the folder; the first of a name wins.

    Symlinks are followed. A repository in the Hugging Face cache is called by its own name,
    ``owner/name``, and is its newest revision. Bundles are not looked into, so their number costs little.
    """
    found: dict[str, ModelSet] = {}
    for folder in folders:
        for name, path in _walk(str(folder), "", frozenset()):
            found.setdefault(name, ModelSet(path))
    found.pop("", None)  # bundles loose in the folder itself have no name
    return dict(sorted(found.items()))


def _walk(folder: str, name: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Path]]:
    """In strings where it can be, as ``Path``s are slow: every node has a menu of the sets."""
    try:
        status = Path(folder).stat()
        with os.scandir(folder) as entries:
            folders = sorted(entry.name for entry in entries if _may_hold_sets(entry))
    except OSError:  # an unplugged disk or a folder of someone else's: it has no sets for us
        return
    identity = (status.st_dev, status.st_ino)
    if identity in above:  # a symlink back up
        return
    above |= {identity}
    if HUB_FOLDERS.issubset(folders):
        parent, _, last = (name or Path(folder).name).rpartition("/")
        yield from _walk(str(hub_snapshot(Path(folder))), f"{parent}/{hub_name(last)}".lstrip("/"), above)
        return
    if any(inside.endswith(SUFFIX) for inside in folders):
        yield name, Path(folder)
    for inside in folders:
        if not inside.endswith((SUFFIX, ".aimodelc")):
            yield from _walk(f"{folder}/{inside}", f"{name}/{inside}".lstrip("/"), above)


def _may_hold_sets(entry: "os.DirEntry[str]") -> bool:
    if entry.name.startswith(".") or entry.name == ARCHIVE_JUNK:
        return False
    try:
        return entry.is_dir()
    except OSError:  # a link into a folder of someone else's
        return False


def choose_model_set(name: str, sets: dict[str, ModelSet]) -> ModelSet:
    """The set called ``name``; only names that were found are taken, so no path can be smuggled in."""
    if name not in sets:
        raise ContractError(f"no model set is called {name!r}: there are {', '.join(map(repr, sets)) or 'none'}")
    return sets[name]
