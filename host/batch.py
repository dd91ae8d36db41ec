"""Pictures asked for in a file: which of them can share one encoding and one load of the model."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .contract import ContractError
from .denoiser import Shortcuts
from .sampling import DEFAULTS, Settings

SUFFIXES = (".png", ".webp")


@dataclass(frozen=True)
class Job:
    """One picture: what it shows, how it is sampled, and where it goes."""

    prompt: str
    output: Path
    width: int | None = None
    height: int | None = None
    seed: int = 0
    negative_prompt: str | None = None
    settings: Settings = DEFAULTS

    def __post_init__(self) -> None:
        if (self.width is None) != (self.height is None):
            raise ContractError("give both width and height, or neither")
        if self.output.suffix.lower() not in SUFFIXES:
            raise ContractError(
                f"{self.output} would lose the transparency: choose a name that ends in {' or '.join(SUFFIXES)}"
            )
        if not self.output.parent.is_dir():
            raise ContractError(f"{self.output.parent} is not a folder: make it first")

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height) in pixels, if they are asked for."""
        return None if self.width is None or self.height is None else (self.width, self.height)

    def changed(self, values: dict[str, Any]) -> "Job":
        """This job with ``values`` in place, by the names of ``Job``, ``Settings`` and ``Shortcuts``."""
        groups: list[dict[str, Any]] = [{}, {}, {}]
        for name, value in values.items():
            for group, owner in zip(groups, (Job, Settings, Shortcuts), strict=True):
                kind = _KINDS[owner].get(name)
                if kind is not None:
                    if not isinstance(value, kind) or isinstance(value, bool):
                        raise ContractError(f"{name} is {value!r}, which is of the wrong type")
                    group[name] = tuple(value) if isinstance(value, list) else value
                    break
            else:
                known = ", ".join(name for names in _KINDS.values() for name in names)
                raise ContractError(f"{name!r} is no setting of a picture: there are {known}")
        own, settings, shortcuts = groups
        if "output" in own:
            own["output"] = Path(own["output"])
        new = replace(self.settings, shortcuts=replace(self.settings.shortcuts, **shortcuts), **settings)
        return replace(self, settings=new, **own)


_KINDS: dict[type, dict[str, Any]] = {
    Job: {"prompt": str, "output": str, "width": int, "height": int, "seed": int, "negative_prompt": str},
    Settings: {"steps": int, "cfg": int | float, "sampler": str, "schedule": str, "sigmas": list},
    Shortcuts: {"text_reuse": str, "first_block_cache": int | float, "step_cache": int | float},
}
"""What a file may set, and the JSON types it may have."""


def read_jobs(path: Path, default: Job) -> list[Job]:
    """The jobs of a JSON file: a list of objects, each with what differs from ``default``, its ``output`` at least.

    Relative outputs count from the working folder. Raises ``ContractError`` that names the job.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(f"cannot read jobs from {path}: {error}") from error
    if not isinstance(content, list) or not content or not all(isinstance(values, dict) for values in content):
        raise ContractError(
            f'{path} must hold a list of objects, such as [{{"prompt": "a star", "seed": 1, "output": "star-1.png"}}]'
        )
    jobs: list[Job] = []
    for number, values in enumerate(content, start=1):
        if not values.get("prompt", default.prompt):
            raise ContractError(f"job {number} of {path} has no prompt: say what it shows")
        if "output" not in values:
            raise ContractError(f"job {number} of {path} has no output: name the file it writes")
        try:
            job = default.changed(values)
        except ContractError as error:
            raise ContractError(f"job {number} of {path}: {error}") from error
        if any(job.output.resolve() == other.output.resolve() for other in jobs):
            raise ContractError(f"job {number} of {path} writes {job.output}, as another job does: rename one")
        jobs.append(job)
    return jobs


def grouped(jobs: Iterable[Job]) -> list[Sequence[Job]]:
    """Jobs that differ in seed and output alone, together; groups in the order of their first job."""
    groups: dict[Job, list[Job]] = {}
    for job in jobs:
        groups.setdefault(replace(job, seed=0, output=Path(f"any{SUFFIXES[0]}")), []).append(job)
    return list(groups.values())
