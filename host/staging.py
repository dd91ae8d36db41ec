"""Files of a model set on their way: fetched into a hidden folder, compared with their hashes, put in place.

A folder whose name starts with a dot is never listed as a model set, so nothing half there is used.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from .bundle import PROGRAM, SUFFIX, CoreAIUnavailableError, read_bundle
from .contract import ContractError
from .files import remembered, sha256_of
from .hub import RemoteFile, Repository, fetch


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` bytes are there; ``file`` is being fetched, or compared with its hash."""

    stage: Literal["fetch", "check"]
    file: str
    done: int
    total: int


Report = Callable[[Progress], None]


def fetch_all(staging: Path, repository: Repository, files: Iterable[RemoteFile], report: Report) -> None:
    """Every one of ``files`` into the folder ``staging``, whole; what is there already stays."""
    files = list(files)
    total, before = sum(file.size for file in files), 0
    for file in files:
        _fetch_one(repository, file, staging / file.name, partial(_tell, report, file, before, total))
        before += file.size


def _tell(
    report: Report, file: RemoteFile, before: int, total: int, stage: Literal["fetch", "check"], there: int
) -> None:
    report(Progress(stage, file.name, before + there, total))


def _fetch_one(repository: Repository, file: RemoteFile, path: Path, tell: Callable[..., None]) -> None:
    tell("check", 0)
    if is_whole(path, file):
        return
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path, file)
    fetch(repository, file, part, partial(tell, "fetch"))
    tell("check", file.size)
    if not is_whole(part, file):
        part.unlink()
        raise ContractError(
            f"{file.name} arrived damaged: its hash is not the one that {repository.address} lists. It is discarded; "
            "run the same command again. If that does not help, something on the way (a proxy, a mirror) changes files"
        )
    _move(part, path, file)


def _part(path: Path, file: RemoteFile) -> Path:
    """What has arrived of ``file``. Named after its content, so parts of two revisions never mix."""
    return path.with_name(f"{path.name}.{file.digest[:16]}.part")


def bytes_to_fetch(staging: Path, file: RemoteFile) -> int:
    path = staging / file.name
    there = path if path.is_file() else _part(path, file)
    return max(0, file.size - there.stat().st_size) if there.is_file() else file.size


def prune(staging: Path, files: Iterable[RemoteFile]) -> None:
    """Remove all but ``files`` and parts of them: leftovers of another choice must not become part of the set."""
    keep = {path for file in files for path in (staging / file.name, _part(staging / file.name, file))}
    for path in sorted(staging.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in keep:
            path.unlink()


def is_whole(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size and _digest(path, file) == file.digest


def _digest(path: Path, file: RemoteFile) -> str:
    """The kind of hash that the hub has of ``file``: SHA-256 of what is in Git LFS, else git's own of a blob."""
    if len(file.digest) == 64:
        return sha256_of(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def install(staging: Path, target: Path, repository: Repository, files: Iterable[RemoteFile]) -> None:
    """``staging`` becomes ``target`` in one step; if that exists, ``files`` go into it, programs last."""
    files = list(files)
    if not target.exists():
        _check_bundles(staging, repository, files)
        staging.rename(target)
        for file in files:
            _keep_hash(target / file.name, file)
        return
    for file in sorted(files, key=lambda file: file.name.endswith(PROGRAM)):
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        _move(staging / file.name, path, file)
    shutil.rmtree(staging)
    _check_bundles(target, repository, files)


def _move(source: Path, path: Path, file: RemoteFile) -> None:
    source.replace(path)
    _keep_hash(path, file)


def _keep_hash(path: Path, file: RemoteFile) -> None:
    """A file that was compared with its hash and then moved need not be read again to know it."""
    if len(file.digest) == 64:
        remembered(path, "sha256", lambda: file.digest)


def _check_bundles(folder: Path, repository: Repository, files: Iterable[RemoteFile]) -> None:
    """Core AI has the last word on each bundle, where it is installed."""
    for name in sorted({name for file in files if (name := file.name.split("/")[0]).endswith(SUFFIX)}):
        try:
            read_bundle(folder / name)
        except CoreAIUnavailableError:
            return
        except ContractError as error:
            raise ContractError(
                f"{name} is as {repository.address} has it, but no good bundle ({error}): choose another --revision, "
                "and tell its author"
            ) from error
