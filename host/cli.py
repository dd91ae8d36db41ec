"""The ``coreai-rgba`` command."""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .bundle import CoreAIUnavailableError
from .contract import PIXELS_PER_TOKEN, ContractError
from .model_set import EMBEDDED_NAME, ModelSet, available_model_sets, choose_model_set

if TYPE_CHECKING:
    from .batch import Job
    from .pipeline import Event

MODELS_VARIABLE = "COREAI_RGBA_MODELS"
PREFERRED_SIZE = 512
INTERRUPTED = 130

JOB_OPTIONS = (
    "width", "height", "seed", "negative_prompt", "steps", "cfg", "sampler", "schedule", "sigmas", "text_reuse",
    "first_block_cache", "step_cache",
)  # fmt: skip
"""Options of ``generate`` that are settings of a picture; a job of a batch file may set its own."""

ORACLE_OPTIONS = (
    "prompt", "steps", "seed", "negative_prompt", "cfg", "dtype", "embed_perturb", "perturb_seed",
)  # fmt: skip
"""Options of ``oracle`` that are part of a request as they are."""


def model_folders() -> list[Path]:
    """``$COREAI_RGBA_MODELS``, and ``models/coreai`` of the ComfyUI this pack is installed in."""
    configured = [Path(folder) for folder in os.environ.get(MODELS_VARIABLE, "").split(os.pathsep) if folder]
    custom_nodes = Path(__file__).parents[2]
    installed = [custom_nodes.parent / "models" / "coreai"] if custom_nodes.name == "custom_nodes" else []
    return configured + installed


def choose(name: str) -> ModelSet:
    """A model set by its name or by the path of its folder."""
    sets = available_model_sets(model_folders())
    if name not in sets and Path(name).is_dir():
        return ModelSet(Path(name))
    return choose_model_set(name, sets)


def default_size(model: ModelSet) -> tuple[int, int]:
    """(width, height): 512 x 512 where the set has it, else its largest picture."""
    sizes = list(model.vae_decoders)
    if not sizes:
        raise ContractError(f"{model.path} holds no VAE decoder: run coreai-rgba models to see what it lacks")
    height, width = (PREFERRED_SIZE,) * 2 if (PREFERRED_SIZE,) * 2 in sizes else max(sizes, key=lambda s: s[0] * s[1])
    return width, height


def generate_command(options: argparse.Namespace) -> None:
    from .batch import Job, grouped, read_jobs

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
            _generate_group(model, group, log)


def _generate_group(model: ModelSet, jobs: Sequence["Job"], log: IO[str] | None) -> None:
    """Make and save pictures that differ in their seeds alone."""
    from PIL import Image
    from tqdm import tqdm

    from .pipeline import Event, generate_batch

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


def models_command(options: argparse.Namespace) -> None:
    for name, model in available_model_sets(model_folders()).items():
        print(f"{name}  {model.path}")
        for line in model.report():
            print(f"  {line}")
    folders = ", ".join(map(str, model_folders()))
    print(f"looked in: {folders or 'no folder, set ' + MODELS_VARIABLE}")


def export_command(options: argparse.Namespace) -> None:
    from .export.lora import Lora
    from .export.model_set import DEFAULT_SIZES, export_model_set

    loras = [Lora.parse(text) for text in options.lora]
    sizes = options.size or DEFAULT_SIZES
    export_model_set(
        options.checkpoint, options.out, options.parts, sizes, options.dit_compute,
        loras=loras, encoder_compute=options.encoder_compute,
    )  # fmt: skip
    print(options.out.resolve())


def bench_command(options: argparse.Namespace) -> int:
    from .bench.command import bench, default_sections, model_sections

    sections = default_sections() if options.model is None else model_sections(choose(options.model))
    return bench(sections, options.json, options.plot)


def oracle_command(options: argparse.Namespace) -> None:
    from .export.model_set import parse_size
    from .gates.oracle import Request, capture

    height, width = (tokens * PIXELS_PER_TOKEN for tokens in parse_size(options.size))
    settings = {name: value for name in ORACLE_OPTIONS if (value := getattr(options, name)) is not None}
    capture(Request(options.checkpoint, width=width, height=height, **settings), options.out)
    print(options.out.resolve())


def gates_command(options: argparse.Namespace) -> int:
    from .gates.captured import Oracle
    from .gates.command import Options, gates, gates_of_the_embedded_model

    chosen = Options(
        options.embed_perturb, range(options.perturb_seed, options.perturb_seed + options.perturb_runs), options.json,
        options.html,
    )  # fmt: skip
    if (options.oracle is None) != (options.set is None):
        raise ContractError("--oracle and --set belong together: give both, or neither for the model that ships")
    if options.oracle is None:
        return gates_of_the_embedded_model(chosen)
    in_bf16 = None if options.bf16_oracle is None else Oracle(options.bf16_oracle)
    return gates(Oracle(options.oracle), in_bf16, choose(options.set), chosen)


def host_constants_command(options: argparse.Namespace) -> int:
    from .gates.constants import host_constants

    checks = host_constants(options.out, options.checkpoint)
    print(*checks, sep="\n")
    return int(any(check.same is False for check in checks))


def add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    generate = commands.add_parser("generate", help="prompt to a picture with transparency")
    generate.add_argument("prompt", metavar="PROMPT", nargs="?")
    generate.add_argument(
        "--model", metavar="SET", default=EMBEDDED_NAME, help="name or folder of a model set (default: %(default)s)"
    )
    generate.add_argument("--width", type=int, metavar="W", help="pixels, a multiple of 16 that the set has a VAE for")
    generate.add_argument("--height", type=int, metavar="H")
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
        "--step-cache", type=float, metavar="SHARE", help="approximate: so many of the steps, up to 0.5, cost nothing"
    )
    generate.add_argument(
        "--first-block-cache", type=float, metavar="F", help="approximate: skip blocks while the first changes less"
    )
    generate.add_argument(
        "--batch-file", type=Path, metavar="JOBS.json", help="a list of pictures: output and what differs of each"
    )
    generate.add_argument("--progress-file", type=Path, metavar="FILE", help="write a JSON line for each step")
    generate.set_defaults(run=generate_command)


def add_oracle(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    oracle = commands.add_parser(
        "oracle", help="run diffusers' own pipeline and record every number on the way; goes on where it stopped"
    )
    oracle.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="layout of Qwen/Qwen-Image-2.1")
    oracle.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    oracle.add_argument("--size", default="256", metavar="SIZE", help="256 or 384x256, multiples of 32 (default: 256)")
    oracle.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: 40)")
    oracle.add_argument("--prompt", metavar="T", help="default: a red apple on a wooden table, studio lighting")
    oracle.add_argument("--seed", type=int, metavar="N", help="seed of the noise (default: 1234)")
    oracle.add_argument("--negative-prompt", metavar="T", help="what to move away from; needs --cfg above 1")
    oracle.add_argument("--cfg", type=float, metavar="F", help="guidance; 1 is off (default: 1)")
    oracle.add_argument("--dtype", choices=("fp32", "bf16"), help="precision of the networks (default: fp32)")
    oracle.add_argument(
        "--embed-perturb", type=float, metavar="REL", help="multiply the prompt's embeddings by 1 + REL * N(0, 1)"
    )
    oracle.add_argument("--perturb-seed", type=int, metavar="K", help="seed of that N(0, 1) (default: 0)")
    oracle.set_defaults(run=oracle_command)


def add_gates(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    gates = commands.add_parser(
        "gates", help="compare a model set with the reference implementation, number by number; 1 if a bar is missed"
    )
    gates.add_argument("--oracle", type=Path, metavar="FOLDER", help="what coreai-rgba oracle made of the checkpoint")
    gates.add_argument("--set", metavar="SET", help="the model set exported from it (default: the one that ships)")
    gates.add_argument("--bf16-oracle", type=Path, metavar="FOLDER", help="the same request in bf16, for comparison")
    gates.add_argument(
        "--embed-perturb", type=float, default=1e-5, metavar="REL",
        help="see how far pictures move when embeddings change by this share; 0 is off (default: 1e-5)",
    )  # fmt: skip
    gates.add_argument("--perturb-seed", type=int, default=0, metavar="K", help="first seed of that (default: 0)")
    gates.add_argument("--perturb-runs", type=int, default=5, metavar="N", help="how many seeds (default: 5)")
    gates.add_argument("--json", type=Path, metavar="FILE.json")
    gates.add_argument("--html", type=Path, metavar="FILE.html", help="a page with pictures and curves, in one file")
    gates.set_defaults(run=gates_command)


def add_host_constants(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    constants = commands.add_parser(
        "host-constants", help="RoPE tables and scheduler.json for hosts in other languages, checked bit for bit"
    )
    constants.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    constants.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="take its scheduler settings (default: those of Qwen-Image-2.1)"
    )
    constants.set_defaults(run=host_constants_command)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coreai-rgba", description="RGBA pictures on Apple's Core AI runtime.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is loaded and how long it takes")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_generate(commands)

    models = commands.add_parser("models", help="list model sets and what each lacks")
    models.set_defaults(run=models_command)

    export = commands.add_parser("export", help="checkpoint to bundles")
    export.add_argument(
        "parts", nargs="*", metavar="PART", default=["all"], help="dit, encoder, vae, host or all (default)"
    )
    export.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="layout of Qwen/Qwen-Image-2.1")
    export.add_argument("--out", type=Path, required=True, metavar="SET")
    export.add_argument("--size", action="append", metavar="SIZE", help="VAE size, 512 or 384x256; may be repeated")
    export.add_argument(
        "--dit-compute", choices=("bf16", "fp32"), default="bf16", help="precision of the DiT's computation"
    )
    export.add_argument(
        "--encoder-compute", choices=("bf16", "r32", "fp32"), default="fp32",
        help="precision of the text encoder's computation; only fp32 keeps every token of every prompt",
    )  # fmt: skip
    export.add_argument(
        "--lora", action="append", default=[], metavar="FILE[:STRENGTH]",
        help="safetensors file of a LoRA for the DiT; strength 1 if not given; may be repeated",
    )  # fmt: skip
    export.set_defaults(run=export_command)

    bench = commands.add_parser("bench", help="what reuse and the fast modes save, as ratios with their bars")
    bench.add_argument("--model", metavar="SET", help="measure a model set (default: a random DiT, and the demo set)")
    bench.add_argument("--json", type=Path, metavar="FILE.json")
    bench.add_argument("--plot", type=Path, metavar="FILE.png")
    bench.set_defaults(run=bench_command)

    add_oracle(commands)
    add_gates(commands)
    add_host_constants(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 1 with a message on standard error."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        return options.run(options) or 0
    except (ContractError, CoreAIUnavailableError) as error:
        print(f"coreai-rgba: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("coreai-rgba: interrupted", file=sys.stderr)
        return INTERRUPTED
