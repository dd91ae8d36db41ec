"""What a model set holds and lacks, in one structure: text for people, JSON for scripts and the browser.

Bundles are opened for it, and hashed the first time, which takes a minute for the published set. For
a mere list, ``find_model_sets`` and ``bundle_paths`` do with names.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import compiled
from .bundle import PROGRAM, Bundle, CoreAIUnavailableError
from .contract import DIT, TEXT_ENCODER, VAE_DECODER, ContractError
from .model_set import ModelSet, picture_size
from .published import ModelSetError, kind_by_name, looks_published

INSTALL_COMMAND = "pip install coreai-core"
EXPECTED_FILES = ("LICENSE", "NOTICE", "config.json")
"""Of the published set, which can draw without them."""


@dataclass(frozen=True)
class Problem:
    """Something wrong. ``command`` mends it, empty if no command can; ``blocks`` if no picture can be made with it."""

    text: str
    command: str
    blocks: bool


@dataclass(frozen=True)
class Compiled:
    """The copy compiled ahead of time for a Mac: its name, chip and bytes, all empty where there is none.

    ``needed`` says whether the bundle cannot be loaded without one on this machine.
    """

    name: str
    architecture: str
    size: int
    needed: bool

    @property
    def text(self) -> str:
        if self.name:
            return f"compiled for {self.architecture} ({gigabytes(self.size)})"
        return "not compiled" if self.needed else "needs no compiled copy here"


@dataclass(frozen=True)
class Part:
    """One bundle. ``size`` in bytes, ``limits`` of its dynamic axes in tokens, ``picture`` (width, height) in pixels.

    ``kind`` is what its graph is. Where that cannot be read, ``guessed`` says that ``kind`` and
    ``picture`` are what its name promises; they may then be empty.
    """

    name: str
    kind: str
    guessed: bool
    size: int
    functions: tuple[str, ...] = ()
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    picture: tuple[int, int] | None = None
    compiled: Compiled | None = None

    @property
    def text(self) -> str:
        words = [f"{self.kind or 'unknown'}{' (by its name)' if self.guessed else ''}: {self.name}"]
        words.append(gigabytes(self.size))
        if self.picture:
            words.append("{}x{} pixels".format(*self.picture))
        if self.kind == TEXT_ENCODER.kind and self.limits:
            words.append("prompts of up to {1} tokens with their template".format(*self.limits["Lfull"]))
        if self.kind == DIT.kind and self.limits:
            words.append("{} to {} image tokens".format(*self.limits["N"]))
            words.append(f"functions {' '.join(self.functions)}")
        return ", ".join([*words, *([self.compiled.text] if self.compiled else [])])


@dataclass(frozen=True)
class Description:
    """One model set; ``sizes`` are the pictures it draws, (width, height) in pixels."""

    name: str
    path: str
    licence: str
    parts: tuple[Part, ...]
    sizes: tuple[tuple[int, int], ...]
    problems: tuple[Problem, ...]

    @property
    def usable(self) -> bool:
        """Whether a picture can be made with it here and now."""
        return not any(problem.blocks for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "usable": self.usable}

    def lines(self) -> Iterator[str]:
        if self.licence:
            yield f"licence: {self.licence}"
        yield from (part.text for part in self.parts)
        yield f"sizes: {', '.join(f'{width}x{height}' for width, height in self.sizes) or 'none'}"
        for problem in self.problems:
            yield f"{'problem' if problem.blocks else 'note'}: {problem.text}"
            if problem.command and problem.command not in problem.text:
                yield f"fix: {problem.command}"


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def describe(name: str, model: ModelSet) -> Description:
    """All there is to say about ``model``; what is wrong with it is a ``Problem``, not an exception."""
    problems: dict[str, Problem] = {}
    parts: list[Part] = []
    try:
        parts = [_part(path, found, problems) for path, found in model.contents.items()]
        _check(model, problems)
    except CoreAIUnavailableError as error:
        parts = [_guessed(model.path / name) for name in model.names]
        problems[str(error)] = Problem(str(error), INSTALL_COMMAND, True)
    except ContractError as error:  # not even its folder can be read
        _add(problems, error, blocks=True)
    licence = ""
    try:
        licence = model.licence
    except ContractError as error:
        _add(problems, error, blocks=False)
    sizes = {part.picture for part in parts if part.picture}
    return Description(name, str(model.path), licence, tuple(parts), tuple(sorted(sizes)), tuple(problems.values()))


def _part(path: Path, found: Bundle | ContractError, problems: dict[str, Problem]) -> Part:
    if isinstance(found, ContractError):
        _add(problems, found, blocks=False)  # of the parts that a picture needs, _check says so
        return _guessed(path)
    kind, state = found.spec.kind, compiled.state(found)
    if state.problem:
        problems[state.problem] = Problem(
            state.problem, compiled.compile_advice(found), blocks=kind != VAE_DECODER.kind
        )
    copy = Compiled(
        state.path.name if state.path else "", state.architecture or "", _bytes_in(state.path), state.needed
    )
    height, width = picture_size(found) if kind == VAE_DECODER.kind else (0, 0)
    picture = (width, height) if width else None
    return Part(path.name, kind, False, found.size, tuple(found.functions), dict(found.spec.limits), picture, copy)


def _guessed(path: Path) -> Part:
    found = re.match(r"qi21_vae_(\d+)(?:x(\d+))?_", path.name)
    picture = (int(found[1]), int(found[2] or found[1])) if found else None
    return Part(path.name, kind_by_name(path.name) or "", True, _bytes_in(path / PROGRAM), picture=picture)


def _bytes_in(path: Path | None) -> int:
    """Of a file or of all files of a folder, 0 if there is none."""
    if path is None or not path.exists():
        return 0
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _check(model: ModelSet, problems: dict[str, Problem]) -> None:
    """Add what keeps the set from making pictures, and what else it should have."""
    needed: tuple[Callable[[], object], ...] = (
        lambda: model.text_encoder, lambda: model.dit, lambda: _any_decoder(model),
        lambda: model.tokenizer, lambda: model.scheduler_config, lambda: model.rope_tables,
    )  # fmt: skip
    for read in needed:
        try:
            read()
        except ContractError as error:
            _add(problems, error, blocks=True)
    missing = [name for name in EXPECTED_FILES if not (model.path / name).is_file()]
    if missing and looks_published(model.path):
        _add(problems, ModelSetError(f"{model.path} has no {', '.join(missing)}", model.path, "host"), blocks=False)


def _any_decoder(model: ModelSet) -> None:
    if not model.vae_decoders:
        raise ModelSetError(f"{model.path} holds no VAE decoder", model.path, "vae")


def _add(problems: dict[str, Problem], error: ContractError, *, blocks: bool) -> None:
    command = error.command if isinstance(error, ModelSetError) else ""
    problems[str(error)] = Problem(str(error), command, blocks)
