"""Where the pack keeps what it can make again, and what it remembers about files."""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "COREAI_RGBA_CACHE"

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``$COREAI_RGBA_CACHE``, else the platform's cache folder; not created here."""
    if configured := os.environ.get(CACHE_VARIABLE):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "coreai-rgba-image"


def hash_file(path: Path) -> str:
    """The file's SHA-256, computed now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(path: Path) -> str:
    """The file's SHA-256, remembered."""
    return remembered(path, "sha256", lambda: hash_file(path))


def remembered(path: Path, what: str, compute: Callable[[], Any]) -> Any:
    """A JSON value that depends on the file at ``path`` alone, computed again only when the file changes.

    Kept on disk by size and modification time: hashing the published DiT takes longer than
    loading it, and so does reading its signature.
    """
    status = path.stat()
    key = hashlib.sha256(os.fsencode(f"{what}:{path.resolve()}")).hexdigest()[:32]
    memory = cache_folder() / "remembered" / f"{key}.json"
    stamp = [status.st_size, status.st_mtime_ns]
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return known["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not computed before, or damaged: computing it again is the remedy for both
    value = compute()
    try:
        write_atomically(memory, json.dumps({"stamp": stamp, "value": value}))
    except OSError as error:  # what can be computed again must not fail a picture
        logger.warning("cannot remember the %s of %s (%s): it is computed each time", what, path, error)
    return value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file so that a reader sees the old or the new content, never half of one.

    Any number of threads and processes may write the same file; the last one wins. Raises
    ``OSError`` where the disk is full or cannot be written, and leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
