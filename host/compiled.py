"""Copies of bundles compiled ahead of time for one Mac: whether there is one that can be loaded.

A copy is ``<set>/aot/<name>/<name>.<architecture>.aimodelc``, with a record beside it of what it was made from. A
copy without a record was made by hand, and is taken if it loads. Loading a copy that does not fit, or a large bundle
that is not compiled, would abort the process; so neither is tried in ours.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from . import mac, probe, process
from .bundle import Bundle
from .contract import DIT, TEXT_ENCODER, VAE_DECODER, ContractError

SUFFIX = ".aimodelc"
JUST_IN_TIME_LIMIT = 1 << 30
"""Bytes up to which a bundle is compiled just in time on macOS; beyond, only ahead of time."""

EXPANSION = {DIT.kind: 2.0}
"""Size of a copy by the size of its bundle, with some room: the published DiT grows from 14.2 to 27 GB."""
USUAL_EXPANSION = 1.1

PARTS = {"dit": DIT.kind, "encoder": TEXT_ENCODER.kind, "vae": VAE_DECODER.kind}
"""What the command line calls the graphs."""


@dataclass(frozen=True)
class CompiledState:
    """The copy that a Mac would load, and why it cannot, if so; nothing is tried to find out.

    ``problem`` is empty, or one sentence that ends in the command that mends it. ``needed`` says
    whether the bundle can be loaded from a copy alone: a large one, on a Mac.
    """

    path: Path | None
    architecture: str | None
    problem: str
    needed: bool


@dataclass(frozen=True)
class Record:
    """What a copy was made from and by, and its files with their sizes in bytes."""

    source_sha256: str
    architecture: str
    os_build: str
    tool_version: str
    files: dict[str, int]


def state(bundle: Bundle) -> CompiledState:
    """What ``path_to_load`` would find, without a try; elsewhere than on a Mac no copy is needed or looked into."""
    if not mac.on_mac():
        path = next(iter(_copies(bundle)), None)
        return CompiledState(path, None if path is None else architecture_of(bundle, path), "", False)
    needed = bundle.size > JUST_IN_TIME_LIMIT
    try:
        path = _choose(bundle)
        if path is None:
            return CompiledState(None, None, _not_compiled(bundle) if needed else "", needed)
        return CompiledState(path, architecture_of(bundle, path), _fault(bundle, path, probe.known(path)), needed)
    except ContractError as error:
        return CompiledState(None, None, str(error), needed)


def path_to_load(bundle: Bundle) -> Path:
    """What a Mac loads: the compiled copy, or the bundle itself where that is safe.

    A copy that is new here is tried in a process of its own first, for a minute or two. Raises
    ``ContractError`` with the command that helps where loading would abort.
    """
    path = _choose(bundle)
    if path is None:
        if bundle.size > JUST_IN_TIME_LIMIT:
            raise ContractError(_not_compiled(bundle))
        return bundle.path
    tried = probe.known(path)
    if tried is None and not _outdated(bundle, path):
        with process.only_one(f"checks {path.name}"):
            tried = probe.problem_of(bundle.path, path)
    if fault := _fault(bundle, path, tried):
        raise ContractError(fault)
    return path


def compile_advice(bundle: Bundle) -> str:
    """The command that compiles it for this Mac."""
    part = next(part for part, kind in PARTS.items() if kind == bundle.spec.kind)
    return f"coreai-rgba compile {shlex.quote(str(bundle.path.parent.absolute()))} {part}"


def expected_size(bundle: Bundle) -> int:
    """About how many bytes a compiled copy takes."""
    return int(bundle.size * EXPANSION.get(bundle.spec.kind, USUAL_EXPANSION))


def architecture_of(bundle: Bundle, copy: Path) -> str:
    return copy.name[len(bundle.path.stem) + 1 : -len(SUFFIX)]


def copy_path(bundle: Bundle, architecture: str) -> Path:
    return _folder(bundle) / f"{bundle.path.stem}.{architecture}{SUFFIX}"


def _folder(bundle: Bundle) -> Path:
    return bundle.path.parent / "aot" / bundle.path.stem


def record_path(copy: Path) -> Path:
    return copy.with_suffix(".json")


def _copies(bundle: Bundle) -> list[Path]:
    return sorted(
        path
        for path in _folder(bundle).glob(f"*{SUFFIX}")
        if path.name.startswith(f"{bundle.path.stem}.") and path.is_dir()
    )


def _choose(bundle: Bundle) -> Path | None:
    """The copy to load: one that loaded here before, else the one for this chip, else the only one."""
    if not (copies := _copies(bundle)):
        return None
    own = _own_architecture()
    liking = {path: (probe.known(path) == "", architecture_of(bundle, path) == own) for path in copies}
    best = max(copies, key=lambda path: liking[path])
    if len(copies) > 1 and not any(liking[best]):
        raise ContractError(
            f"{_folder(bundle)} holds {', '.join(path.name for path in copies)}, none of them known to be for this "
            f"Mac: keep the one that is, or make it: {compile_advice(bundle)}"
        )
    return best


def _own_architecture() -> str | None:
    try:
        return mac.architecture()
    except ContractError:  # a chip that is new to us: whether a copy loads decides
        return None


def _not_compiled(bundle: Bundle) -> str:
    return (
        f"{bundle.path.name} is not compiled, and macOS would abort while compiling it on the fly. Compile it once, "
        f"which takes about {expected_size(bundle) / 1e9:.1f} GB of disk: {compile_advice(bundle)}"
    )


def _fault(bundle: Bundle, copy: Path, tried: str | None) -> str:
    """Why the copy cannot be used, and the remedy. ``tried``: what came of loading it, None if nobody tried."""
    own, its = _own_architecture(), architecture_of(bundle, copy)
    misfit = f"it is for {its}, and this Mac takes {own}" if own not in (None, its) else ""
    reason = _outdated(bundle, copy)
    if not reason and tried:
        reason = f"it does not load here, {tried}" + (f" ({misfit})" if misfit else "")
    if not reason and tried is None:
        reason = misfit
    return reason and f"the compiled copy {copy.name} cannot be used: {reason}. Compile again: {compile_advice(bundle)}"


def _outdated(bundle: Bundle, copy: Path) -> str:
    """What the copy's record says against it, if there is a record and it does."""
    try:
        record = read_record(copy)
    except (ValueError, TypeError):
        return "its record is damaged"
    if record is None:
        return ""
    if record.source_sha256 != bundle.sha256:
        return f"it was made from another version of {bundle.path.name}"
    if record.files != sizes_of(copy):
        return "its files are not those that were made, so it is damaged"
    return ""


def read_record(copy: Path) -> Record | None:
    path = record_path(copy)
    return Record(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def sizes_of(copy: Path) -> dict[str, int]:
    files = (path for path in copy.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(copy).as_posix(): path.stat().st_size for path in sorted(files)}
