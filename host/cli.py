"""The ``coreai-rgba`` command."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .bundle import CoreAIUnavailableError
from .contract import ContractError
from .model_set import EMBEDDED_NAME, ModelSet, available_model_sets, choose_model_set

MODELS_VARIABLE = "COREAI_RGBA_MODELS"
PREFERRED_SIZE = 512
INTERRUPTED = 130


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
    from PIL import Image
    from tqdm import tqdm

    from .pipeline import generate

    if (options.width is None) != (options.height is None):
        raise ContractError("give both --width and --height, or neither")
    if options.out.suffix.lower() not in (".png", ".webp"):
        raise ContractError(f"{options.out} would lose the transparency: choose a name that ends in .png or .webp")
    if not options.out.parent.is_dir():
        raise ContractError(f"{options.out.parent} is not a folder: make it first")
    model = choose(options.model)
    width, height = default_size(model) if options.width is None else (options.width, options.height)
    with tqdm(total=options.steps, unit="step", disable=None) as bar:
        picture = generate(
            model,
            options.prompt,
            width,
            height,
            steps=options.steps,
            seed=options.seed,
            cfg=options.cfg,
            negative_prompt=options.negative_prompt,
            progress=lambda done, total: bar.update(done - bar.n),
        )
    Image.fromarray(picture).save(options.out, lossless=True)
    print(options.out.resolve())


def models_command(options: argparse.Namespace) -> None:
    for name, model in available_model_sets(model_folders()).items():
        print(f"{name}  {model.path}")
        for line in model.report():
            print(f"  {line}")
    folders = ", ".join(map(str, model_folders()))
    print(f"looked in: {folders or 'no folder, set ' + MODELS_VARIABLE}")


def export_command(options: argparse.Namespace) -> None:
    from .export.model_set import export_model_set

    export_model_set(options.checkpoint, options.out, options.parts, options.size, options.dit_compute)
    print(options.out.resolve())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coreai-rgba", description="RGBA pictures on Apple's Core AI runtime.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is loaded and how long it takes")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="prompt to a picture with transparency")
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument(
        "--model", metavar="SET", default=EMBEDDED_NAME, help="name or folder of a model set (default: %(default)s)"
    )
    generate.add_argument("--width", type=int, metavar="W", help="pixels, a multiple of 16 that the set has a VAE for")
    generate.add_argument("--height", type=int, metavar="H")
    generate.add_argument("--steps", type=int, metavar="N", default=40)
    generate.add_argument("--seed", type=int, metavar="N", default=0)
    generate.add_argument("--negative-prompt", metavar="T", help="what to move away from; needs --cfg above 1")
    generate.add_argument("--cfg", type=float, metavar="F", default=1.0, help="guidance; 1 is off")
    generate.add_argument("-o", "--out", type=Path, metavar="OUT.png", default=Path("out.png"))
    generate.set_defaults(run=generate_command)

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
    export.set_defaults(run=export_command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 1 with a message on standard error."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        options.run(options)
    except (ContractError, CoreAIUnavailableError) as error:
        print(f"coreai-rgba: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("coreai-rgba: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0
