"""Getting a published model set, so that it is either whole and checked or not there.

Files arrive in the hidden folder ``.download-NAME`` beside the set, where the next run goes on; the
last act is to rename that folder to NAME.
"""

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .bundle import PROGRAM, SUFFIX
from .compiled import EXPANSION, USUAL_EXPANSION
from .contract import ContractError
from .files import cache_folder, write_atomically
from .hub import RemoteFile, Repository, fetch, look_up
from .model_set import bundle_paths
from .published import DOWNLOAD_RECORD, PUBLISHED_REPOSITORY, kind_by_name
from .staging import Progress, Report, bytes_to_fetch, fetch_all, install, is_whole, prune

__all__ = ["DownloadRequest", "LicenceError", "Offer", "Progress", "download", "offer"]

NAME = "RGBA-Image-2.1"
LICENCE_NOTICE = "Qwen Research License: research and other non-commercial use only. Built with Qwen."
"""The licence of the published set in one line; its text is the file LICENSE there and in the set."""

VAE_SIZE = re.compile(r"[^/]*_vae_(\d+(?:x\d+)?)_")


@dataclass(frozen=True)
class DownloadRequest:
    """What to download to where: ``folder`` is the folder of model sets, ``name`` the set's in it.

    ``revision`` is a commit, a branch or a tag; ``None`` stands for the commit of an earlier run,
    else the newest. ``sizes`` chooses VAE decoders, such as "512" or "384x256"; empty for all.
    """

    folder: Path
    name: str = NAME
    repository: str = PUBLISHED_REPOSITORY
    revision: str | None = None
    sizes: tuple[str, ...] = ()
    accept_license: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^/\\:.][^/\\:]*", self.name):
            raise ContractError(
                f"{self.name!r} cannot be the name of a model set: give one without slashes and colons that starts "
                f"with no dot, {NAME} for instance"
            )

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @cached_property
    def target(self) -> Path:
        """The set's real folder: a link may lead to another disk, and what is fetched belongs there."""
        if self.path.is_symlink() and not self.path.exists():
            raise ContractError(
                f"{self.path} is a link to {self.path.readlink()}, which is not there: connect that disk, or remove "
                "the link, then run the same command again"
            )
        return self.path.resolve()

    @property
    def staging(self) -> Path:
        return self.target.with_name(f".download-{self.target.name}")

    @property
    def command(self) -> str:
        """The command that makes this request, its licence accepted."""
        parts = ["coreai-rgba", "download", self.name, "--to", str(self.folder)]
        if self.repository != PUBLISHED_REPOSITORY:
            parts += ["--repo", self.repository]
        if self.revision:
            parts += ["--revision", self.revision]
        if self.sizes:
            parts += ["--sizes", ",".join(self.sizes)]
        return shlex.join([*parts, "--accept-license"])

    @property
    def how_to_go_on(self) -> str:
        """What whoever stops it is told."""
        return f"what has arrived stays in {self.staging}; to go on: {self.command}"


@dataclass(frozen=True)
class Offer:
    """What a request would fetch: ``request`` names the commit, ``size`` are the bytes still lacking, ``address`` is
    the repository's page. ``token`` stands for this licence of this commit.
    """

    request: DownloadRequest
    licence: str
    size: int
    address: str

    @property
    def token(self) -> str:
        return hashlib.sha256(f"{self.request.revision}\n{self.licence}".encode()).hexdigest()


class LicenceError(ContractError):
    """The licence, whose ``text`` this carries, has not been accepted."""

    def __init__(self, message: str, text: str):
        super().__init__(message)
        self.text = text


def download(request: DownloadRequest, report: Report = lambda progress: None) -> Path:
    """The folder of the requested model set, fetched as far as it is not there yet.

    ``report`` is called often and may raise to cancel; what has arrived stays for the next call.
    Raises ``LicenceError`` before anything is fetched if the licence is not accepted, and
    ``ContractError`` with the way out for all that goes wrong. A set that was whole stays whole.
    """
    with _disk_explained(request), _alone(request):
        repository = look_up(request.repository, request.revision or _earlier_revision(request))
        files = _chosen(repository, request.sizes)
        _check_target(request, repository, files)
        lacking = [file for file in files if not is_whole(request.target / file.name, file)]
        if lacking:
            _check_licence(request, repository)
            _check_disk(request, files, lacking)
            request.staging.mkdir(parents=True, exist_ok=True)
            prune(request.staging, lacking)
            _write_record(request.staging, repository)
            fetch_all(request.staging, repository, lacking, report)
            install(request.staging, request.target, repository, lacking)
        _write_record(request.target, repository)
    return request.path


def offer(request: DownloadRequest) -> Offer:
    """What ``request`` is about, to be shown before it is accepted; raises ``ContractError`` as ``download`` does."""
    with _disk_explained(request):
        repository = look_up(request.repository, request.revision or _earlier_revision(request))
        files = _chosen(repository, request.sizes)
        lacking = [file for file in files if not is_whole(request.target / file.name, file)]
        size = sum(bytes_to_fetch(request.staging, file) for file in lacking)
        return Offer(replace(request, revision=repository.revision), _licence(repository), size, repository.address)


def _earlier_revision(request: DownloadRequest) -> str | None:
    """The commit that the set, or what there is of it, was taken from: kept, whatever ``main`` has become."""
    records = (_read_record(folder) for folder in (request.target, request.staging))
    return next((found["revision"] for found in records if found.get("repository") == request.repository), None)


def _read_record(folder: Path) -> dict[str, str]:
    path = folder / DOWNLOAD_RECORD
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"repository": record["repository"], "revision": record["revision"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ContractError(f"{path} is damaged ({error}): remove it, then run the same command again") from error


def _write_record(folder: Path, repository: Repository) -> None:
    record = {"repository": repository.name, "revision": repository.revision}
    if _read_record(folder) != record:
        write_atomically(folder / DOWNLOAD_RECORD, json.dumps(record, indent=1) + "\n")


def _chosen(repository: Repository, sizes: tuple[str, ...]) -> list[RemoteFile]:
    """The files of a set: not hidden ones, and of the VAE decoders those of ``sizes``."""
    if not any(file.name.split("/")[0].endswith(SUFFIX) for file in repository.files):
        raise ContractError(f"{repository.address} holds no {SUFFIX} bundle, so it is no model set: check --repo")
    size_of = {file: found[1] if (found := VAE_SIZE.match(file.name)) else None for file in repository.files}
    offered = sorted({size for size in size_of.values() if size}, key=lambda size: (len(size), size))
    if unknown := sorted(set(sizes) - set(offered)):
        raise ContractError(
            f"{repository.name} has no VAE decoder of size {', '.join(unknown)}: choose from {', '.join(offered)}"
        )
    wanted = {None, *(sizes or offered)}
    return [file for file, size in size_of.items() if size in wanted and not file.name.startswith(".")]


def _check_target(request: DownloadRequest, repository: Repository, files: Iterable[RemoteFile]) -> None:
    """Nothing is put into a set of another origin or revision."""
    target, record = request.target, _read_record(request.target)
    elsewhere = "choose another NAME, or remove what is there"
    if target.exists() and not target.is_dir():
        raise ContractError(f"{target} is a file, so no model set can be there: {elsewhere}")
    if record and record != {"repository": repository.name, "revision": repository.revision}:
        raise ContractError(
            f"{target} holds {record['repository']} at revision {record['revision']}, not {repository.name} at "
            f"{repository.revision}: {elsewhere}"
        )
    known = {file.name.split("/")[0] for file in files}
    bundles = bundle_paths(target) if target.exists() and not record else []
    if foreign := [path.name for path in bundles if path.name not in known]:
        raise ContractError(f"{target} holds {foreign[0]}, which is not of {repository.name}: {elsewhere}")


def _check_licence(request: DownloadRequest, repository: Repository) -> None:
    if request.accept_license:
        return
    raise LicenceError(
        f"nothing is downloaded before the licence is accepted. Read it ({repository.address}); if you accept it: "
        f"{request.command}",
        _licence(repository),
    )


def _licence(repository: Repository) -> str:
    text = next((_text(repository, file) for file in repository.files if file.name == "LICENSE"), "")
    return text or f"{repository.name} has no LICENSE file: see {repository.address}\n"


def _text(repository: Repository, file: RemoteFile) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        fetch(repository, file, path, lambda there: None)
        return path.read_text(encoding="utf-8")


def _check_disk(request: DownloadRequest, files: Iterable[RemoteFile], lacking: Iterable[RemoteFile]) -> None:
    """Room for what is to be fetched and for the compiled copies, which a Mac cannot do without."""
    there = next(folder for folder in request.target.parents if folder.exists())
    free = shutil.disk_usage(there).free
    fetched = sum(bytes_to_fetch(request.staging, file) for file in lacking)
    compiled = sum(_compiled_bytes(request, file) for file in files)
    if free < fetched + compiled:
        raise ContractError(
            f"the disk of {there} has {_gb(free)} free; the download needs {_gb(fetched)} more and the compiled "
            f"copies another {_gb(compiled)}: free {_gb(fetched + compiled - free)}, or choose a folder on another "
            "disk with --to"
        )


def _compiled_bytes(request: DownloadRequest, file: RemoteFile) -> int:
    """What compiling adds for this file: something for a program that has no compiled copy yet."""
    bundle, _, inside = file.name.partition("/")
    stem = bundle.removesuffix(SUFFIX)
    if inside != PROGRAM or (request.target / "aot" / stem).is_dir():
        return 0
    return int(file.size * EXPANSION.get(kind_by_name(bundle) or "", USUAL_EXPANSION))


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


@contextmanager
def _alone(request: DownloadRequest) -> Iterator[None]:
    """One download of a set at a time. The lock ends with its process, however that ends."""
    import fcntl

    key = hashlib.sha256(os.fsencode(request.target)).hexdigest()[:32]
    path = cache_folder() / "downloads" / f"{key}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ContractError(
                f"{request.target} is being downloaded by another process: wait for it, or stop it, then run the same "
                "command again"
            ) from error
        yield


@contextmanager
def _disk_explained(request: DownloadRequest) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ContractError(_disk_message(request.folder, error)) from error


def _disk_message(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full: free space, then run the same command again; it goes on where it stopped"
    if error.errno == errno.EFBIG:
        return (
            f"the file system of {folder} takes no file this large, as FAT32 takes none over 4 GB: choose a folder on "
            "another disk with --to"
        )
    return f"cannot write to {error.filename or folder} ({error.strerror}): make it writable, or choose another --to"
