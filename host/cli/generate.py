"""``coreai-rgba generate``."""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..contract import ContractError
from ..model_set import EMBEDDED_NAME, ModelSet
from .sets import choose, default_size

if TYPE_CHECKING:
    from ..batch import Job
    from ..pipeline import Event

JOB_OPTIONS = (
    "width", "height", "seed", "negative_prompt", "steps", "cfg", "sampler", "schedule", "sigmas", "text_reuse",
    "first_block_cache", "step_cache",
)  # fmt: skip
"""Options of ``generate`` that are settings of a picture; a job of a batch file may set its own."""


def generate_command(options: argparse.Namespace) -> None:
    from ..batch import Job, grouped, read_jobs

    model = choose(options.model)
    given = {name: value for name in JOB_OPTIONS if (value := getattr(options, name)) is not None}
    job = Job(options.prompt or "", options.out).changed(given)
    if (options.prompt is None) == (options.batch_file is None):
        raise ContractError("give either a prompt or --batch-file, whose jobs have prompts of their own")
    jobs = [job] if options.batch_file is None else read_jobs(options.batch_file, job)
    with ExitStack() as stack:
        write = nullcontext() if options.progress_file is None else options.progress_file.open("w", encoding="utf-8")
        log = stack.enter_context(write)
        for group in grouped(jobs):
            _generate_group(model, group, options.keep_loaded, options.tiled, log)


def _generate_group(model: ModelSet, jobs: Sequence["Job"], keep_loaded: str, tiled: bool, log: IO[str] | None) -> None:
    """Make and save pictures that differ in their seeds alone."""
    from PIL import Image
    from tqdm import tqdm

    from ..pipeline import Event, generate_batch

    first = jobs[0]
    width, height = first.size or default_size(model)
    started = time.perf_counter()
    with tqdm(unit="step", disable=None) as bar:

        def report(event: Event) -> None:
            nonlocal started
            if event.stage == "sample":
                bar.total = event.total
                bar.update(event.done - bar.n)
            if log is not None:
                now = time.perf_counter()
                log.write(json.dumps(progress_line(event, now - started)) + "\n")
                log.flush()
                started = now

        pictures = generate_batch(
            model,
            first.prompt,
            width,
            height,
            first.settings,
            seeds=[job.seed for job in jobs],
            negative_prompt=first.negative_prompt,
            keep_loaded=keep_loaded,
            tiled=tiled,
            report=report,
        )
        for job, picture in zip(jobs, pictures, strict=True):
            Image.fromarray(picture).save(job.output, lossless=True)
            print(job.output.resolve())


def progress_line(event: "Event", seconds: float) -> dict[str, object]:
    """One line of a progress file; ``seconds`` since the line before, memory in bytes."""
    import psutil

    return {
        "stage": event.stage,
        "step": event.done,
        "total": event.total,
        "seconds": round(seconds, 4),
        "free_memory": psutil.virtual_memory().available,
    }


def add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    generate = commands.add_parser("generate", help="prompt to a picture with transparency")
    generate.add_argument("prompt", metavar="PROMPT", nargs="?")
    generate.add_argument(
        "--model", metavar="SET", default=EMBEDDED_NAME, help="name or folder of a model set (default: %(default)s)"
    )
    generate.add_argument("--width", type=int, metavar="W", help="pixels, a multiple of 16 that the set has a VAE for")
    generate.add_argument("--height", type=int, metavar="H")
    generate.add_argument(
        "--tiled", action="store_true", help="draw a size that the set has no VAE for from tiles of one that it has"
    )
    generate.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: the model's own, 40)")
    generate.add_argument("--seed", type=int, metavar="N", help="seed of the noise (default: 0)")
    generate.add_argument("--negative-prompt", metavar="T", help="what to move away from; needs --cfg above 1")
    generate.add_argument("--cfg", type=float, metavar="F", help="guidance; 1 is off (default: 1)")
    generate.add_argument("-o", "--out", type=Path, metavar="OUT.png", default=Path("out.png"))
    generate.add_argument("--sampler", metavar="NAME", help="euler (default), adams_bashforth_2m or dpmpp_2m")
    generate.add_argument(
        "--schedule", metavar="NAME", help="model (default), unstretched, or the fixed one of a LoRA: viggle-turbo-6"
    )
    generate.add_argument(
        "--sigmas",
        type=lambda text: [float(number) for number in text.split(",")],
        metavar="1,0.8,...",
        help="noise levels, in place of steps and schedule",
    )
    generate.add_argument(
        "--text-reuse", metavar="on|off|check", help="keys and values of the text once (default) or in every step"
    )
    generate.add_argument(
        "--step-cache",
        type=float,
        metavar="SHARE",
        help="approximate: so many of the steps, up to 0.5, cost nothing (0.25: 1.3 times as fast, 51 dB)",
    )
    generate.add_argument(
        "--first-block-cache",
        type=float,
        metavar="F",
        help="approximate: skip blocks while the first changes less (0.25: 1.65 times as fast, 43 dB)",
    )
    generate.add_argument(
        "--batch-file", type=Path, metavar="JOBS.json", help="a list of pictures: output and what differs of each"
    )
    generate.add_argument("--progress-file", type=Path, metavar="FILE", help="write a JSON line for each step")
    generate.add_argument(
        "--keep-loaded",
        metavar="auto|stage|all",
        default="auto",
        help="how long a bundle stays in memory: while its stage runs (stage), to the end of the command (all), or "
        "like all where memory is left for the largest other one (auto, the default)",
    )
    generate.set_defaults(run=generate_command)
