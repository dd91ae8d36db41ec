"""The bench as one command: its sections one after the other, printed as they come."""

import json
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from ..bundle import Bundle
from ..contract import TEXT_KV, ContractError
from ..denoiser import DIFFERENCE_LIMITS
from ..model_set import EMBEDDED_FOLDER, ModelSet
from .fast import fast_section
from .memory import size_section
from .plot import plot
from .results import Section
from .runs import overhead_section, stages_section
from .steps import (
    DIFFERENCE_BAR,
    GROWTH_SETTINGS,
    RATIO_BARS,
    growth_section,
    measure_steps,
    random_bundles,
    reuse_section,
)


def default_sections() -> Iterator[Section]:
    """Everything that has a bar: a random DiT large enough to measure, then the model that ships."""
    with random_bundles() as (full, alone):
        times = measure_steps(full, [*RATIO_BARS, *GROWTH_SETTINGS])
        yield reuse_section({setting: times[setting] for setting in RATIO_BARS}, RATIO_BARS, DIFFERENCE_BAR)
        yield size_section(full, alone)
    yield growth_section(times)
    demo = ModelSet(EMBEDDED_FOLDER)
    yield overhead_section(demo)
    yield stages_section(demo)
    yield fast_section(demo)


def model_sections(model: ModelSet) -> Iterator[Section]:
    """What can be said of any model set; only the agreement of the velocities has a bar."""
    times = measure_steps(model.dit, [*RATIO_BARS, *GROWTH_SETTINGS])
    yield reuse_section({setting: times[setting] for setting in RATIO_BARS}, {}, difference_bar(model.dit))
    yield growth_section(times)
    yield stages_section(model)
    yield fast_section(model, judged=False)


def difference_bar(dit: Bundle) -> float:
    """What the precision that the bundle computes in allows; the exact one's for a bundle with nothing to compare."""
    kept = dit.functions.get(TEXT_KV.function)
    return DIFFERENCE_LIMITS[kept.outputs[0].dtype] if kept else DIFFERENCE_BAR


def bench(sections: Iterable[Section], json_path: Path | None = None, plot_path: Path | None = None) -> int:
    """Print ``sections`` and write the files that are asked for; the exit status, 1 if a bar is missed.

    Raises ``ContractError`` for a file that could not be written, before anything is measured.
    """
    for path, suffix in ((json_path, ".json"), (plot_path, ".png")):
        if path is not None and (path.suffix != suffix or not path.parent.is_dir()):
            raise ContractError(f"{path} cannot be written: give a file {suffix} in a folder that exists")
    done = []
    for section in sections:
        print(section, flush=True)
        done.append(section)
    if json_path is not None:
        content = {"machine": machine(), "sections": [section.to_json() for section in done]}
        json_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if plot_path is not None:
        plot([panel for section in done for panel in section.panels], plot_path)
    verdicts = [result.ok for section in done for result in section.results if result.bar]
    if all(verdicts):
        return 0
    print(f"coreai-rgba: {verdicts.count(False)} of {len(verdicts)} bars missed", file=sys.stderr)
    return 1


def machine() -> dict[str, str]:
    """Where the figures are from."""
    return {"platform": platform.platform(), "python": platform.python_version(), "coreai-core": version("coreai-core")}
