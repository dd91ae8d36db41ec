"""``coreai-rgba export``."""

import argparse
from pathlib import Path


def export_command(options: argparse.Namespace) -> None:
    from ..export.lora import Lora
    from ..export.model_set import DEFAULT_SIZES, export_model_set

    loras = [Lora.parse(text) for text in options.lora]
    sizes = options.size or DEFAULT_SIZES
    export_model_set(
        options.checkpoint, options.out, options.parts, sizes, options.dit_compute,
        loras=loras, encoder_compute=options.encoder_compute, dry_run=options.dry_run,
    )  # fmt: skip
    if not options.dry_run:
        print(options.out.resolve())


def add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser("export", help="checkpoint to bundles")
    export.add_argument(
        "parts", nargs="*", metavar="PART", default=["all"], help="dit, encoder, vae, host or all (default)"
    )
    export.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="layout of Qwen/Qwen-Image-2.1")
    export.add_argument("--out", type=Path, required=True, metavar="SET")
    export.add_argument(
        "--dry-run", action="store_true",
        help="print what each part takes in disk and memory, and whether there is enough; write nothing",
    )  # fmt: skip
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
