"""Checkpoint to a whole model set in the published layout."""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..bundle import Bundle
from ..contract import DIT, DIT_FUNCTIONS, PIXELS_PER_TOKEN, TEXT_ENCODER, VAE_DECODER, ContractError
from ..graphs.dit import DiT
from ..graphs.dit_functions import Finish, Head, Step, Tail, TextKeysValues
from ..pipeline import grid_of
from ..rope import write_axis_tables
from ..sampling import check_grid
from ..schedule import SchedulerConfig
from .checkpoint import (
    DIT_FOLDER,
    TEXT_ENCODER_FOLDER,
    VAE_FOLDER,
    checkpoint_scheduler,
    encoder_precision,
    load_dit,
    load_text_encoder,
    load_vae_decoder,
)
from .component import Component, Plan
from .convert import Part, remove_abandoned
from .lora import Lora, apply_loras
from .preview_fit import preview_metadata
from .stored import StandIns

PARTS = ("dit", "encoder", "vae", "host")
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEFAULT_SIZES = ("256", "512", "1024")
SCHEDULER_FILE = "scheduler.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip


def export_model_set(
    checkpoint: str | Path,
    out: str | Path,
    parts: Iterable[str] = ("all",),
    sizes: Iterable[str] = DEFAULT_SIZES,
    dit_compute: str = "bf16",
    report: Callable[[str], None] = print,
    loras: Sequence[Lora] = (),
    encoder_compute: str = "fp32",
    dry_run: bool = False,
) -> None:
    """Export ``parts`` of ``checkpoint`` into the model set ``out``, one at a time.

    ``parts`` are among dit, encoder, vae, host, or all; ``sizes`` are pictures the VAE is made for,
    ``512`` or ``384x256`` (width x height). ``dit_compute`` is bf16 or fp32, ``encoder_compute`` fp32,
    r32 or bf16. ``loras`` go into the DiT. ``report`` is told each step, and before them what the
    export takes; with ``dry_run`` that is all.
    Raises ``ContractError`` before anything is written if the request is wrong, the checkpoint does not
    fit its own configuration, or disk or memory do not suffice.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    chosen = _choose(parts)
    grids = [parse_size(size) for size in sizes]
    if not (checkpoint / "model_index.json").is_file():
        raise ContractError(f"{checkpoint} has no model_index.json: pass the folder of a Qwen-Image-2.1 checkpoint")
    if loras and "dit" not in chosen:
        raise ContractError(f"a LoRA changes the DiT, which is not among the parts {chosen}: add dit")
    available = {
        "encoder": [text_encoder(checkpoint, out, encoder_compute)],
        "dit": [dit(checkpoint, out, dit_compute, loras)],
        "vae": [vae_decoder(checkpoint, out, *grid) for grid in grids],
    }
    components = [component for part in available if part in chosen for component in available[part]]
    plan = Plan.of(components, out)
    for line in plan.lines():
        report(line)
    plan.check()
    if dry_run:
        return
    started = time.monotonic()
    if "host" in chosen:
        report("host: tokenizer, RoPE tables, scheduler settings")
        export_host(checkpoint, out)
    remove_abandoned(out)

    def stage(title: str, text: str) -> None:
        report(f"{_elapsed(started)} {title}: {text}")

    for component in components:
        component.export(partial(stage, component.title))
    report(f"{_elapsed(started)} done")


def _elapsed(started: float) -> str:
    return "{:3d}:{:02d}".format(*divmod(round(time.monotonic() - started), 60))


def _choose(parts: Iterable[str]) -> list[str]:
    parts = list(parts)
    if unknown := [part for part in parts if part not in (*PARTS, "all")]:
        raise ContractError(f"unknown parts {unknown}: choose among {', '.join(PARTS)}, all")
    return list(PARTS) if "all" in parts or not parts else parts


def parse_size(size: str) -> tuple[int, int]:
    """``"512"`` or ``"384x256"`` (width x height, pixels) to a grid (height, width) that the DiT takes."""
    numbers = size.lower().split("x")
    if not all(number.isascii() and number.isdigit() for number in numbers) or len(numbers) > 2:
        raise ContractError(f"the size {size!r} is not a number of pixels or WIDTHxHEIGHT")
    grid = grid_of(int(numbers[0]), int(numbers[-1]))
    check_grid(*grid)
    return grid


def text_encoder(checkpoint: Path, out: Path, compute: str = "fp32") -> Component:
    encoder_precision(compute)
    return Component(
        title="text encoder",
        source=checkpoint / TEXT_ENCODER_FOLDER,
        bundle=out / f"qi21_encoder_dynL_{_published_name(compute)}_ids_iofp32.aimodel",
        load=lambda stand_ins: load_text_encoder(checkpoint, compute, stand_ins),
        parts=lambda model: [(model, TEXT_ENCODER.bind({"D": model.config.hidden_size}))],
        describe=lambda model: {"weights": "bf16", "compute": compute},
    )


def export_text_encoder(checkpoint: Path, out: Path, compute: str = "fp32") -> Bundle:
    return text_encoder(checkpoint, out, compute).export()


def dit(checkpoint: Path, out: Path, compute: str, loras: Sequence[Lora] = ()) -> Component:
    if compute not in COMPUTE_DTYPES:
        raise ContractError(f"dit compute is {compute!r}: choose one of {', '.join(COMPUTE_DTYPES)}")

    def load(stand_ins: StandIns) -> DiT:
        model = load_dit(checkpoint, COMPUTE_DTYPES[compute], stand_ins)
        apply_loras(model, loras)
        return model

    def describe(model: DiT) -> dict[str, Any]:
        metadata: dict[str, Any] = {"weights": "bf16", "compute": compute, "num_layers": model.config.num_layers}
        return {**metadata, "loras": [lora.describe() for lora in loras]} if loras else metadata

    bundle = out / f"qi21_dit_full_{_published_name(compute)}_dyn_iofp32.aimodel"
    return Component("DiT", checkpoint / DIT_FOLDER, bundle, load, dit_parts, describe)


def _published_name(compute: str) -> str:
    """The word for ``compute`` in the published bundles' names: weights of 16 bits, activations of 32 are w16a32."""
    return "w16a32" if compute == "fp32" else compute


def dit_parts(model: DiT) -> list[Part]:
    """``main``, as published, and the functions that save work when a sampler calls them."""
    config = model.config
    sizes = {
        "D": config.context_in_dim,
        "width": config.width,
        "blocks": config.num_layers,
        "heads": config.num_attention_heads,
        "head_size": config.attention_head_dim,
    }
    dtype = str(model.compute_dtype).removeprefix("torch.")
    modules = (model, TextKeysValues(model), Step(model), Head(model), Tail(model), Finish(model))
    return [(module, spec.bind(sizes, dtype)) for module, spec in zip(modules, (DIT, *DIT_FUNCTIONS), strict=True)]


def vae_decoder(checkpoint: Path, out: Path, height: int, width: int) -> Component:
    pixels = {"H": height * PIXELS_PER_TOKEN, "W": width * PIXELS_PER_TOKEN}
    name = f"{pixels['W']}" if height == width else f"{pixels['W']}x{pixels['H']}"
    return Component(
        title=f"VAE decoder {pixels['W']}x{pixels['H']}",
        source=checkpoint / VAE_FOLDER,
        bundle=out / f"qi21_vae_{name}_fp32.aimodel",
        load=lambda stand_ins: load_vae_decoder(checkpoint, height, width, stand_ins),
        parts=lambda model: [(model, VAE_DECODER.bind({"N": height * width, **pixels}))],
        describe=lambda model: {
            "weights": "fp32",
            "compute": "fp32",
            "height": pixels["H"],
            "width": pixels["W"],
            "latents_mean": model.config.latents_mean,
            "latents_std": model.config.latents_std,
            **preview_metadata(checkpoint),
        },
    )


def export_host(checkpoint: Path, out: Path) -> None:
    """What a host needs beside the bundles, in the published layout; licence files where there are any."""
    processor = checkpoint / "processor"
    if not (processor / "tokenizer.json").is_file():
        raise ContractError(f"{processor} has no tokenizer.json: the host tokenizes with it")
    write_host_constants(out / "host", checkpoint_scheduler(checkpoint))
    (out / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (processor / name).is_file():
            shutil.copyfile(processor / name, out / "tokenizer" / name)
    shutil.copyfile(checkpoint / "transformer" / "config.json", out / "config.json")
    for name in ("LICENSE", "NOTICE"):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, out / name)


def write_host_constants(folder: Path, config: SchedulerConfig) -> None:
    """``rope_axis{0,1,2}_{cos,sin}.f32`` and ``scheduler.json``, as in a model set's ``host/``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_axis_tables(folder)
        (folder / SCHEDULER_FILE).write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ContractError(f"cannot write to {folder} ({error}): choose another folder") from error
