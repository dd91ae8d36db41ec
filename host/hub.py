"""Files of a repository on the Hugging Face hub, fetched so that what is there is never fetched twice.

huggingface_hub knows addresses, tokens and errors; its own download deletes an unfinished file when
it fails and starts that file again, 14 GB in our case. Here the part stays and the rest is asked for.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TypeVar

from .contract import ContractError

TRIES = 5
"""So many failures in a row, without a new byte between them, end a download."""
FIRST_WAIT = 1.0
"""Seconds before the second try; doubled each time."""
PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP statuses that may be gone a moment later."""
PARTIAL = 206

HUB_ADVICE = "pip install 'huggingface_hub>=1,<2'"

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its "/"-joined name, its bytes, and what its content hashes to.

    ``digest`` is the SHA-256 of a large file (64 digits) or git's SHA-1 of a small one (40).
    """

    name: str
    size: int
    digest: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.name).parts
        if not parts or parts[0] == "/" or ".." in parts or set("\\:") & set(self.name):
            raise ContractError(f"the repository lists the file {self.name!r}, which would leave its folder: refused")
        if self.size is None or self.digest is None:
            raise ContractError(f"the hub tells no size or no hash of {self.name}: is HF_ENDPOINT right?")


@dataclass(frozen=True)
class Repository:
    """A repository at one commit; ``address`` is its page."""

    name: str
    revision: str
    address: str
    files: tuple[RemoteFile, ...]


def import_hub() -> tuple[ModuleType, ModuleType]:
    """``huggingface_hub`` and the ``httpx`` it speaks through, imported on first use."""
    try:
        import httpx
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ContractError(f"downloading needs huggingface_hub ({error}): {HUB_ADVICE}") from error
    if huggingface_hub.__version__.split(".")[0] != "1":
        raise ContractError(
            f"huggingface_hub {huggingface_hub.__version__} is not the one that downloads are written for: "
            f"{HUB_ADVICE} (in an environment of its own, if another package needs the one that is here)"
        )
    return huggingface_hub, httpx


def look_up(name: str, revision: str | None) -> Repository:
    """What the repository ``name`` holds at ``revision``: a commit, a branch or a tag, ``None`` for its newest.

    Raises ``ContractError`` with the way out if the hub does not tell.
    """
    hub, _ = import_hub()
    with _explained(name, revision):
        info = _patiently(
            lambda: hub.HfApi().model_info(
                name, revision=revision, files_metadata=True, timeout=hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
            )
        )
    files = tuple(
        RemoteFile(entry.rfilename, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in info.siblings or ()
    )
    return Repository(name, info.sha, f"{hub.constants.ENDPOINT}/{name}", files)


def fetch(repository: Repository, file: RemoteFile, part: Path, report: Callable[[int], None]) -> None:
    """Append to ``part`` what it lacks of ``file``; ``report`` hears how many bytes are there, and may raise.

    A cut connection or a busy server is tried again from where it stopped. The content is not
    judged here. Raises ``ContractError`` if the hub does not give the file, ``OSError`` if the disk
    does not take it; what has arrived stays in ``part``.
    """
    part.touch()
    if part.stat().st_size > file.size:
        part.write_bytes(b"")
    if part.stat().st_size < file.size:
        with _explained(repository.name, repository.revision):
            _patiently(lambda: _append(repository, file, part, report), lambda: part.stat().st_size)


def _append(repository: Repository, file: RemoteFile, part: Path, report: Callable[[int], None]) -> None:
    """One request for the rest of ``file``."""
    hub, httpx = import_hub()
    have = part.stat().st_size
    report(have)
    url = hub.hf_hub_url(repository.name, file.name, revision=repository.revision)
    headers = {**hub.utils.build_hf_headers(), "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    with part.open("ab") as out, hub.get_session().stream("GET", url, headers=headers, timeout=timeout) as answer:
        if answer.is_error:
            answer.read()
        hub.hf_raise_for_status(answer)
        if have and answer.status_code != PARTIAL:  # the whole file comes, though the rest was asked for
            out.truncate(0)
            have = 0
        for piece in answer.iter_bytes():
            out.write(piece)
            have += len(piece)
            report(have)
            if have > file.size:  # nor will more make it right
                return
    if have < file.size:
        raise httpx.RemoteProtocolError(f"{file.name} ended after {have} of {file.size} bytes")


def _patiently(attempt: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """What ``attempt`` returns, tried again after failures that may pass."""
    hub, httpx = import_hub()
    failures = 0
    while True:
        before = progress()
        try:
            return attempt()
        except (hub.errors.HfHubHTTPError, httpx.TransportError) as error:
            passing = not isinstance(error, hub.errors.HfHubHTTPError) or error.response.status_code in PASSING
            failures = 1 if progress() > before else failures + 1
            if not passing or failures == TRIES:
                raise
            wait = FIRST_WAIT * 2 ** (failures - 1)
            logger.warning("%s: trying again in %g s", _first_line(error), wait)
            time.sleep(wait)


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """What the hub and the way to it can say no with, as ``ContractError``s that tell what to do."""
    hub, httpx = import_hub()
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    try:
        yield
    except hub.utils.HFValidationError as error:
        raise ContractError(f"{name!r} is no name of a repository: give OWNER/NAME with --repo") from error
    except (json.JSONDecodeError, KeyError) as error:  # a hotel's login page, for instance
        raise ContractError(
            f"what answers at {endpoint} is not the Hugging Face hub: log in to the network you are in, or unset "
            "HF_ENDPOINT, then run the same command again"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise ContractError(
            "HF_HUB_OFFLINE is set, so nothing can be downloaded: unset HF_HUB_OFFLINE, then run the same command again"
        ) from error
    except errors.GatedRepoError as error:
        raise ContractError(
            f"{name} is open only to those who asked for access: ask for it on {endpoint}/{name}, log in with "
            "hf auth login, then run the same command again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ContractError(
            f"there is no repository {name} on {endpoint}, or your token may not see it: check --repo, or hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ContractError(
            f"{name} has no revision {revision!r}: leave --revision out for the newest, or take a commit from "
            f"{endpoint}/{name}/commits/main"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ContractError(_refusal(name, endpoint, error.response.status_code, _first_line(error))) from error
    except httpx.HTTPError as error:
        raise ContractError(
            f"the connection to {endpoint} failed ({_first_line(error)}): check the network, then run the same command "
            "again; it goes on where it stopped"
        ) from error


def _refusal(name: str, endpoint: str, status: int, reason: str) -> str:
    if status in PASSING:
        return (
            f"{endpoint} does not serve {name} now ({reason}): run the same command again later; it goes on where it "
            "stopped"
        )
    if status in (401, 403):
        return (
            f"{endpoint} forbids {name} ({reason}): look at {endpoint}/{name} in a browser, log in with hf auth login, "
            "then run the same command again"
        )
    return f"{endpoint} does not give {name} ({reason}): run the same command again, or choose another --revision"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__
