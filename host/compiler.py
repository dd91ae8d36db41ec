"""Making compiled copies: one at a time, in a folder aside, tried before it takes the place of an old one."""

import contextlib
import json
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from . import mac, probe, process
from .bundle import Bundle
from .compiled import Record, architecture_of, copy_path, expected_size, read_record, record_path, sizes_of
from .contract import ContractError

TEMPORARY_PREFIX = ".compiling-"


@dataclass(frozen=True)
class Progress:
    """``stage`` is "up to date", "compile", "load check" or "done"; ``seconds`` since it began, of "done" in all."""

    bundle: Bundle
    stage: str
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """For people: what is being done, and for how long if some time has passed."""
        elapsed = f", {minutes(self.seconds)}" if self.seconds else ""
        match self.stage:
            case "compile":
                return f"compiling, to about {expected_size(self.bundle) / 1e9:.1f} GB{elapsed}"
            case "load check":
                return f"compiled, now trying whether it loads here{elapsed}"
            case "done":
                return f"done in {minutes(self.seconds)}"
        return self.stage


def minutes(seconds: float) -> str:
    return "{}:{:02}".format(*divmod(int(seconds), 60))


Report = Callable[[Progress], object]


def compile_set(
    bundles: Iterable[Bundle],
    architecture: str | None = None,
    report: Report = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    force: bool = False,
) -> list[Path]:
    """Compile each bundle whose copy is not up to date, or each with ``force``; the copies.

    Stops at the first that fails, as ``compile_bundle`` does; copies made before it stay.
    """
    architecture = _architecture(architecture)
    copies = []
    for bundle in bundles:
        copy = copy_path(bundle, architecture)
        if not force and _is_up_to_date(bundle, copy):
            report(Progress(bundle, "up to date"))
        else:
            compile_bundle(bundle, architecture, report, cancelled)
        copies.append(copy)
    return copies


def _architecture(named: str | None) -> str:
    mac.tool_version()  # first, so that what has to be installed is said before anything else
    architecture = named or mac.architecture()
    if not re.fullmatch(r"[a-z0-9]+", architecture):
        raise ContractError(f"the architecture is {architecture!r}: it is a name like h16c, which is the M4 Max")
    return architecture


def _is_up_to_date(bundle: Bundle, copy: Path) -> bool:
    try:
        record = read_record(copy)
    except (ValueError, TypeError):
        return False
    return record == _new_record(bundle, architecture_of(bundle, copy), copy) and not probe.known(copy)


def _new_record(bundle: Bundle, architecture: str, copy: Path) -> Record:
    return Record(bundle.sha256, architecture, mac.os_build(), mac.tool_version(), sizes_of(copy))


def compile_bundle(
    bundle: Bundle,
    architecture: str | None = None,
    report: Report = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Compile it for one architecture, this Mac's unless it is named, try the copy, and put it in its place.

    ``report`` and ``cancelled`` are called about twice a second. Raises ``ContractError`` with the
    way out, ``process.CancelledError`` when cancelled; in each case a copy that was there before
    stays, and nothing half-done.
    """
    started = time.monotonic()
    architecture = _architecture(architecture)
    copy = copy_path(bundle, architecture)
    with process.only_one(f"compiles {bundle.path.name}") as lock, _temporary_folder(bundle) as temporary:
        _check_free_disk(bundle, temporary)
        stage = _stage(bundle, "compile", report)
        made = _run_compiler(bundle, architecture, temporary, stage, cancelled, lock)
        problem = probe.problem_of(bundle.path, made, _stage(bundle, "load check", report), cancelled, [lock])
        if problem:
            raise ContractError(
                f"{bundle.path.name}, compiled for {architecture}, does not load here, {problem}. Nothing was kept. "
                "Try again, with --architecture if this Mac is of another; h16c is the M4 Max"
            )
        record = json.dumps(asdict(_new_record(bundle, architecture, made)))
        (temporary / "record").write_text(record, encoding="utf-8")
        _move_into_place(temporary, made, copy)
    report(Progress(bundle, "done", time.monotonic() - started))
    return copy


def _stage(bundle: Bundle, name: str, report: Report) -> Callable[[float], object]:
    report(Progress(bundle, name))
    return lambda seconds: report(Progress(bundle, name, seconds))


@contextlib.contextmanager
def _temporary_folder(bundle: Bundle) -> Iterator[Path]:
    """On the disk of the set, and gone afterwards, with what a process that was killed left there."""
    folder = bundle.path.parent
    try:
        for left in folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(left)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ContractError(
            f"the compiled copy cannot be written to {folder} ({error}): make room and make the folder writable, or "
            "copy the set to another disk"
        ) from error


def _check_free_disk(bundle: Bundle, folder: Path) -> None:
    needed, free = expected_size(bundle), shutil.disk_usage(folder).free
    if free < needed:
        raise ContractError(
            f"compiling {bundle.path.name} needs about {needed / 1e9:.1f} GB in {bundle.path.parent}, "
            f"{free / 1e9:.1f} GB are free: make room, or move the set to another disk"
        )


def _run_compiler(
    bundle: Bundle,
    architecture: str,
    temporary: Path,
    report: Callable[[float], object],
    cancelled: Callable[[], bool],
    lock: int,
) -> Path:
    ended = process.run(mac.compile_command(bundle.path, temporary, architecture), report, cancelled, keep_open=[lock])
    if ended.status and "no space left" in ended.output.lower():
        raise ContractError(
            f"the disk became full while {bundle.path.name} was compiled, which takes about "
            f"{expected_size(bundle) / 1e9:.1f} GB: make room, or move the set to another disk"
        )
    if ended.status:
        raise ContractError(f"{bundle.path.name} was not compiled: {mac.explain(ended.status, ended.output)}")
    made = temporary / copy_path(bundle, architecture).name
    if not made.is_dir() or not sizes_of(made):
        by_hand = shlex.join(mac.compile_command(bundle.path, copy_path(bundle, architecture).parent, architecture))
        raise ContractError(
            f"coreai-build reported no error and made no copy of {bundle.path.name}. Its last words: "
            f"{mac.last_words(ended.output)}. Try again while nothing else uses the GPU; to see all it says: {by_hand}"
        )
    return made


def _move_into_place(temporary: Path, made: Path, copy: Path) -> None:
    """Replace the copy and its record; the old copy comes back if anything, Ctrl-C too, comes between."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    replaced = temporary / "replaced"
    try:
        if copy.exists():
            copy.rename(replaced)
        made.rename(copy)
    except BaseException:
        if replaced.exists() and not copy.exists():
            replaced.rename(copy)
        raise
    (temporary / "record").replace(record_path(copy))
