"""All gates as one command: the table as it comes, the verdict last, and a report to keep."""

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..contract import ContractError
from ..files import cache_folder
from ..model_set import EMBEDDED_FOLDER, ModelSet
from .captured import Oracle, Request
from .checks import Drawn, draw
from .oracle import capture, fingerprint
from .report import report_page
from .rows import Findings, Probe, Row
from .subject import Subject
from .table import END_TO_END, GATES, judge

EMBEDDED_CHECKPOINT = EMBEDDED_FOLDER.parent / "checkpoint"
EMBEDDED_REQUEST = Request(EMBEDDED_CHECKPOINT, "a large red star sticker, transparent background")
PERTURBATION, PERTURBED_RUNS = 1e-5, 5
"""What the port's author perturbed prompt embeddings by, and how often."""

PACKAGES = ("coreai-core", "torch", "diffusers", "transformers")
COLUMNS = ("PSNR on white, dB", "alpha, levels", "corr of the final latents")


def captured(request: Request) -> Oracle:
    """The oracle of ``request``, captured once and kept in the cache, until checkpoint or libraries change."""
    return capture(request, cache_folder() / "oracles" / fingerprint(request))


def control_steps(steps: int) -> tuple[int, ...]:
    """The first, the middle and the last one, which is where the port's author placed controls."""
    return tuple(sorted({0, steps // 2, steps - 1}))


def gate_rows(subject: Subject) -> Iterator[Row]:
    """Row by row, as each takes its time."""
    few = control_steps(len(subject.steps))
    for gate in GATES:
        yield judge(gate, subject, few)


def sensitivity(subject: Subject, relative: float, seeds: range) -> Probe:
    """Whole runs whose embeddings differ by ``relative``: how far apart equally good runs are."""
    runs = {}
    for seed in seeds:
        drawn = draw(subject, relative, seed)
        runs[f"perturbation {seed}"] = [figure.value for figure in drawn.figures(subject.oracle)]
    return Probe(
        "Sensitivity",
        f"Our pipeline with prompt embeddings multiplied by 1 + {relative:g} N(0, 1), against the unperturbed "
        "reference. A spread of many dB means that the picture forks, and that a low figure is no error of the port.",
        COLUMNS,
        runs,
    )


def own_band(subject: Subject, in_bf16: Oracle, rows: list[Row]) -> Probe:
    """The reference computed in bf16 against itself in fp32, beside ours."""
    states = [*(in_bf16.latents(step) for step in range(1, in_bf16.request.steps)), in_bf16.final_latents]
    reference = Drawn(states, in_bf16.rgba8[0])
    runs = {"diffusers in bf16": [figure.value for figure in reference.figures(subject.oracle)]}
    for row in rows:
        if row.gate == END_TO_END and row.measured:
            runs["this port"] = [figure.value for figure in row.measured.figures]
    return Probe(
        "The model's own band",
        "What bf16 does to the reference itself, against its fp32 result: a port that computes in bf16 belongs here.",
        COLUMNS,
        runs,
    )


def about(subject: Subject) -> dict[str, str]:
    request = subject.oracle.request
    return {
        "model set": subject.model.path.name,
        "checkpoint": subject.checkpoint.name,
        "prompt": request.prompt,
        "picture": f"{request.width}x{request.height}, {request.steps} steps, seed {request.seed}, cfg {request.cfg:g}",
        "bundles": ", ".join(f"{bundle.path.name} {bundle.sha256[:12]}" for bundle in subject.model.bundles),
        "machine": platform.platform(),
        **{package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def judge_all(subject: Subject, probes: Callable[[list[Row]], list[Probe]]) -> Findings:
    """Every gate, printed as it is done."""
    rows = []
    for row in gate_rows(subject):
        print(row, flush=True)
        rows.append(row)
    return Findings(about(subject), rows, probes(rows))


@dataclass(frozen=True)
class Options:
    """What a user may choose. ``relative`` 0 leaves the sensitivity probe out."""

    relative: float = PERTURBATION
    seeds: range = range(PERTURBED_RUNS)
    json_path: Path | None = None
    html_path: Path | None = None

    def __post_init__(self) -> None:
        for path, suffix in ((self.json_path, ".json"), (self.html_path, ".html")):
            if path is not None and (path.suffix != suffix or not path.parent.is_dir()):
                raise ContractError(f"{path} cannot be written: give a file {suffix} in a folder that exists")


def gates(oracle: Oracle, in_bf16: Oracle | None, model: ModelSet, options: Options) -> int:
    """Judge ``model`` by ``oracle``; the exit status, 1 if a gate failed or none could be run.

    ``in_bf16`` is the same request captured in bf16, for the model's own band.
    """
    subject = Subject(oracle, oracle.request.checkpoint, model, range(oracle.steps))

    def probes(rows: list[Row]) -> list[Probe]:
        found = [] if in_bf16 is None else [own_band(subject, in_bf16, rows)]
        if options.relative and any(row.gate == END_TO_END and row.measured for row in rows):
            found.append(sensitivity(subject, options.relative, options.seeds))
        return found

    findings = judge_all(subject, probes)
    for probe in findings.probes:
        print(probe)
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(findings.to_json(), indent=2) + "\n", encoding="utf-8")
    if options.html_path is not None:
        options.html_path.write_text(report_page(findings), encoding="utf-8")
    print(findings.verdict)
    return 0 if findings.passed else 1


def gates_of_the_embedded_model(options: Options) -> int:
    """Capture what is needed, or take it from the cache, and judge the model that ships."""
    fp32, bf16 = (captured(replace(EMBEDDED_REQUEST, dtype=dtype)) for dtype in ("fp32", "bf16"))
    return gates(fp32, bf16, ModelSet(EMBEDDED_FOLDER), options)
