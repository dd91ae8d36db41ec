"""Encoded prompts, kept in memory and on disk: the encoder is the largest bundle, and a prompt is often drawn again.

An entry is found by everything that shapes it. The encoder sees token ids and nothing else, so the
ids stand for the text, the chat template and the tokenizer's files; beside them count the encoder's
hash and the engine that runs it. The text itself is not written anywhere.

A file holds a SHA-256 of its own name and of the data that follows, little-endian float32
``[1, L, D]``. Whatever is wrong with a file, the prompt is encoded again and the file replaced.
Processes share the folder: files appear whole, and one that another process removed is a miss.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from .bundle import Bundle
from .contract import ContractError
from .files import CACHE_VARIABLE, cache_folder, write_atomically
from .prompt import PromptTokens

DISK_VARIABLE = "COREAI_RGBA_PROMPT_CACHE_MB"
MEMORY_VARIABLE = "COREAI_RGBA_PROMPT_CACHE_MEMORY_MB"
DISK_MEGABYTES = 512
"""Sixty prompts of the published model at their longest, 8.3 MB, or about a thousand of usual length."""
MEMORY_MEGABYTES = 64
"""A few prompts: reading one from disk takes milliseconds, so memory matters where the disk cannot be written."""

SUFFIX = ".f32"
DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


def embed(
    encoder: Bundle, prompts: Sequence[PromptTokens], encode: Callable[[list[PromptTokens]], list[np.ndarray]]
) -> list[np.ndarray]:
    """The embeddings ``[1, L, D]`` float32 of each prompt, from the cache or from ``encode``.

    ``encode`` is called once with the distinct prompts that are missing, or not at all. The arrays
    are copies, the caller's own: as tensors they may be written to by whoever receives them.
    Raises ``ContractError`` for limits in the environment that are no sizes, before anything else.
    """
    cache = PromptCache.configured()
    entries = [Entry.of(encoder, tokens) for tokens in prompts]
    found = {entry: array for entry in dict.fromkeys(entries) if (array := cache.get(entry)) is not None}
    missing = {entry: tokens for entry, tokens in zip(entries, prompts, strict=True) if entry not in found}
    if missing:
        for entry, array in zip(missing, encode(list(missing.values())), strict=True):
            found[entry] = array.copy()  # not a view, which would keep the embeddings of the whole template
            cache.put(entry, found[entry])
    return [found[entry].copy() for entry in entries]


@dataclass(frozen=True)
class Entry:
    """The name and the shape ``[1, L, D]`` of one prompt's embeddings."""

    key: str
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, encoder: Bundle, tokens: PromptTokens) -> "Entry":
        made_from = [encoder.sha256, _engine(), tokens.ids.tolist(), tokens.drop_idx]
        key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        return cls(key, (1, tokens.text_length, int(encoder.spec.output("hidden").shape[2])))


def _engine() -> str:
    """What computes: another version or machine may round differently, and on macOS the system does the work."""
    return f"{version('coreai-core')} {sys.platform} {platform.machine()} {platform.mac_ver()[0]}"


class MemoryCache:
    """Embeddings by key, the least recently used first. For any number of threads."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> np.ndarray | None:
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
            return self._arrays.get(key)

    def put(self, key: str, array: np.ndarray, limit: int) -> None:
        """Keep ``array``, and of the others as many as fit into ``limit`` bytes beside it."""
        if array.nbytes > limit:
            return
        with self._lock:
            self._arrays[key] = array
            self._arrays.move_to_end(key)
            while sum(kept.nbytes for kept in self._arrays.values()) > limit:
                self._arrays.popitem(last=False)


_memory = MemoryCache()
"""This process's."""


@dataclass(frozen=True)
class DiskCache:
    """Embeddings in files of ``folder``, together at most ``limit`` bytes. No method raises ``OSError``.

    A file's modification time is that of its last use. While several processes write at once they
    may exceed the limit by a file each, until the last of them has tidied up.
    """

    folder: Path
    limit: int

    def path(self, entry: Entry) -> Path:
        return self.folder / f"{entry.key}{SUFFIX}"

    def get(self, entry: Entry) -> np.ndarray | None:
        """The embeddings, not writable, or ``None`` where there are none or none that are whole."""
        path = self.path(entry)
        try:
            array = _unpack(entry, path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the cached prompt %s cannot be used (%s): it is encoded again", path, error)
            return None
        self.touch(entry)
        return array

    def put(self, entry: Entry, array: np.ndarray) -> None:
        """Write the embeddings, and remove what was not used for longest beyond the limit."""
        content = _pack(entry, array)
        if len(content) > self.limit:
            logger.warning(
                "the encoded prompt takes %.1f MB, so it is not kept on disk: %s allows %.1f MB",
                len(content) / 1e6, DISK_VARIABLE, self.limit / 1e6,
            )  # fmt: skip
            return
        try:
            write_atomically(self.path(entry), content)
            self._remove_oldest()
        except OSError as error:
            logger.warning(
                "the disk is full or cannot be written, so the encoded prompt is kept in memory only (%s): "
                "make room in %s, or point %s to another disk",
                error, self.folder, CACHE_VARIABLE,
            )  # fmt: skip

    def touch(self, entry: Entry) -> None:
        """Note that the entry was used."""
        with contextlib.suppress(OSError):  # on a disk that is read-only nothing is removed either
            os.utime(self.path(entry))

    def _remove_oldest(self) -> None:
        """Temporary files count as well: those that a killed process left behind grow old and go."""
        files = []
        for path in self.folder.glob(f"*{SUFFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # another process removed or renamed it
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= size


def _pack(entry: Entry, array: np.ndarray) -> bytes:
    data = array.astype("<f4").tobytes()
    return _digest(entry, data) + data


def _unpack(entry: Entry, content: bytes) -> np.ndarray:
    """Raises ``ValueError`` unless ``content`` is what ``_pack`` made of this entry's embeddings."""
    digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if digest != _digest(entry, data):
        raise ValueError("its checksum does not match")
    array = np.frombuffer(data, "<f4").reshape(entry.shape)
    if not np.isfinite(array).all():
        raise ValueError("it holds values that are not finite")
    return array


def _digest(entry: Entry, data: bytes) -> bytes:
    return hashlib.sha256(entry.key.encode() + data).digest()


@dataclass(frozen=True)
class PromptCache:
    """Memory before disk. A disk limit of 0 turns both off, a memory limit of 0 the memory."""

    disk: DiskCache
    memory_limit: int

    @classmethod
    def configured(cls) -> "PromptCache":
        """As the environment says; ``ContractError`` if that makes no sense."""
        disk = DiskCache(cache_folder() / "prompts", _bytes_of(DISK_VARIABLE, DISK_MEGABYTES))
        return cls(disk, _bytes_of(MEMORY_VARIABLE, MEMORY_MEGABYTES))

    def get(self, entry: Entry) -> np.ndarray | None:
        if not self.disk.limit:
            return None
        array = _memory.get(entry.key)
        if array is not None:
            self.disk.touch(entry)
            return array
        array = self.disk.get(entry)
        if array is not None:
            _memory.put(entry.key, array, self.memory_limit)
        return array

    def put(self, entry: Entry, array: np.ndarray) -> None:
        """Keep ``array``, which must not change from here on."""
        if not self.disk.limit:
            return
        if not np.isfinite(array).all():
            logger.warning("the text encoder gave values that are not finite: they are not kept")
            return
        _memory.put(entry.key, array, self.memory_limit)
        self.disk.put(entry, array)


def _bytes_of(variable: str, default: float) -> int:
    """A limit in megabytes from the environment, in bytes."""
    text = os.environ.get(variable) or str(default)
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = float("nan")
    if not 0 <= megabytes < float("inf"):
        raise ContractError(f"{variable} is {text!r}: set it to a number of megabytes, or to 0 to keep nothing there")
    return int(megabytes * 1e6)
