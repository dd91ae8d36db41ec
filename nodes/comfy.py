"""Where the nodes touch ComfyUI: its folders, progress, interruption, latent and image types; memory: ``comfy_memory``.

ComfyUI's types at this boundary: LATENT is a dict whose ``samples [B, 64, h, w]`` are in VAE space;
CONDITIONING is ``[[tensor [1, L, D], options]]``; IMAGE is ``[B, H, W, C]`` in [0, 1].
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import folder_paths
import numpy as np
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy_api.latest import ComfyExtension, io

from ..host.contract import LATENT_CHANNELS, PIXELS_PER_TOKEN, ContractError
from ..host.latents import LatentStatistics, from_vae_space, pack, to_vae_space, unpack
from ..host.model_set import EMBEDDED_NAME, ModelSet, available_model_sets, choose_model_set
from ..host.pixels import alpha_to_mask, to_rgba8, to_unit
from ..host.preview import PreviewMap, preview_picture
from ..host.residency import KEEP
from ..host.sampler import Step
from ..host.sampling import MAX_STEPS
from ..host.schedule import NAMED_SCHEDULES
from .comfy_events import SamplingReport, Ui, pictures_ui
from .comfy_memory import share_memory

__all__ = ["ComfyExtension", "io", "pictures_ui"]

FOLDER = "coreai"
TOKENS_KEY = "coreai_rgba_tokens"
"""LATENT key under which the sampler's own tokens ride along, so that decoding loses nothing."""

EMPTY_LATENT_PIXELS = {4: 8, 16: 8, LATENT_CHANNELS: PIXELS_PER_TOKEN}
"""Pixels per latent pixel of an empty latent, by its number of channels."""

CATEGORY = "Core AI"

CANNOT_DO = {
    "control": "a ControlNet",
    "gligen": "GLIGEN boxes",
    "reference_latents": "reference latents",
    "concat_latent_image": "an inpainting latent (use Set Latent Noise Mask)",
    "noise_concat": "latents beside the noise",
    "unclip_conditioning": "an image prompt",
}
"""What a CONDITIONING may ask of a sampler that this model has no input for, by ComfyUI's key."""

NATIVE_ONLY = {
    "area": "an area",
    "mask": "a mask",
    "start_percent": "a range of steps",
    "end_percent": "a range of steps",
    "hooks": "hooks",
}
"""What only a native sampler does with one."""

folder_paths.add_model_folder_path(FOLDER, str(Path(folder_paths.models_dir) / FOLDER))
share_memory()


def model_sets() -> dict[str, ModelSet]:
    return available_model_sets(folder_paths.get_folder_paths(FOLDER))


def model_input() -> io.Combo.Input:
    """The menu of model sets; built anew each time, so a new set needs no restart."""
    return io.Combo.Input(
        "model",
        options=list(model_sets()),
        tooltip="Model set: a folder in models/coreai with the bundles of one model. "
        f"'{EMBEDDED_NAME}' comes with the pack.",
    )


def keep_input() -> io.Combo.Input:
    """The menu of how long a node's bundle stays in memory."""
    return io.Combo.Input(
        "keep_loaded",
        options=list(KEEP),
        default="auto",
        optional=True,
        tooltip="How long the bundle stays in memory: 'stage', while this node runs and no other is loaded; 'all', "
        "until ComfyUI unloads models or the memory is needed; 'auto', so long as memory is left for the set's others.",
    )


def steps_input() -> io.Int.Input:
    return io.Int.Input("steps", default=40, min=1, max=MAX_STEPS, tooltip="Denoising steps; the model's own is 40.")


def schedule_input(optional: bool = False) -> io.Combo.Input:
    return io.Combo.Input(
        "schedule",
        options=list(NAMED_SCHEDULES),
        default="model",
        optional=optional,
        tooltip="The model set's own noise levels, with or without their stretched end, or the fixed ones of a "
        "distilled LoRA.",
    )


def denoise_input() -> io.Float.Input:
    return io.Float.Input(
        "denoise",
        default=1.0,
        min=0.0,
        max=1.0,
        step=0.01,
        tooltip="How much of the latent is drawn anew: 1 is all of it.",
    )


def model_set(name: str) -> ModelSet:
    return choose_model_set(name, model_sets())


def fingerprint(name: str) -> str:
    """Changes when a file of the model set does, so that ComfyUI runs the node again."""
    found = model_sets().get(name)
    return repr(found and found.fingerprint)


def to_conditioning(embeddings: np.ndarray) -> list[list[Any]]:
    return [[torch.from_numpy(embeddings), {}]]


def check_conditioning(name: str, options: dict[str, Any]) -> None:
    """Raise ``ContractError`` if a CONDITIONING with these options asks for what this model cannot do."""
    unable = [what for key, what in CANNOT_DO.items() if options.get(key) is not None]
    if unable:
        raise ContractError(f"{name} conditioning asks for {', '.join(unable)}: this model has no such input")
    mask = options.get("attention_mask")
    if mask is not None and not mask.all():
        raise ContractError(f"{name} conditioning is padded: encode prompts of other lengths one by one")


def from_conditioning(conditioning: list[list[Any]], name: str) -> np.ndarray:
    """The embeddings of a CONDITIONING, which may hold one entry for the whole picture."""
    if len(conditioning) != 1:
        raise ContractError(
            f"{name} holds {len(conditioning)} conditionings: this sampler takes one, do not combine them"
        )
    embeddings, options = conditioning[0]
    check_conditioning(name, options)
    unable = sorted({what for key, what in NATIVE_ONLY.items() if options.get(key) is not None})
    if unable:
        raise ContractError(
            f"{name} asks for {', '.join(unable)}, which this sampler does not have: use KSampler on Core AI Model, or "
            "remove that node"
        )
    return embeddings.detach().to("cpu", torch.float32).numpy()


def from_sigmas(sigmas: torch.Tensor | None) -> np.ndarray | None:
    return None if sigmas is None else sigmas.detach().to("cpu", torch.float32).numpy()


@dataclass(frozen=True)
class StartLatents:
    """What a LATENT asks the sampler to start from: model-space ``latents [B, 64, h, w]``, zero where empty."""

    latents: np.ndarray
    batch_index: list[int] | None
    mask: np.ndarray | None


def read_start(latent: dict[str, Any], statistics: LatentStatistics) -> StartLatents:
    """Any all-zero latent stands for an empty picture of its size; others must be of this model."""
    samples = _samples(latent)
    if torch.count_nonzero(samples) == 0:
        height, width = _empty_grid(latent, samples)
        latents = np.zeros((len(samples), LATENT_CHANNELS, height, width), dtype=np.float32)
    else:
        height, width = samples.shape[2:]
        latents = unpack(read_tokens(latent, statistics), height, width)
    mask = latent.get("noise_mask")
    if mask is not None:
        mask = comfy.utils.reshape_mask(mask.cpu().float(), (len(samples), 1, height, width)).numpy()
    return StartLatents(latents, latent.get("batch_index"), mask)


def read_tokens(latent: dict[str, Any], statistics: LatentStatistics) -> np.ndarray:
    """Model-space tokens ``[B, N, 64]`` of a LATENT of this model.

    The tokens that ride along are used only if converting them gives exactly ``samples``: any node
    in between that touched ``samples`` has the last word.
    """
    samples = _samples(latent)
    check_channels(samples)
    z = samples.numpy()
    tokens = latent.get(TOKENS_KEY)
    if tokens is not None and tokens.shape == (len(z), z.shape[2] * z.shape[3], LATENT_CHANNELS):
        carried = tokens.cpu().numpy()
        if np.array_equal(unpack(to_vae_space(carried, statistics), *z.shape[2:]), z):
            return carried
    return pack(from_vae_space(z, statistics))


def check_channels(samples: torch.Tensor) -> None:
    """Raise ``ContractError`` unless latents ``[B, C, h, w]`` may be this model's."""
    if samples.shape[1] != LATENT_CHANNELS:
        raise ContractError(
            f"these latents have {samples.shape[1]} channels, this model's have {LATENT_CHANNELS}: they come from "
            "another model, so decode them with VAE Decode and that model's VAE, and sample them with KSampler and it"
        )


def write_latent(
    latent: dict[str, Any], tokens: np.ndarray, grid: tuple[int, int], statistics: LatentStatistics
) -> dict[str, Any]:
    """A copy of ``latent`` with the sampler's result."""
    result = {key: value for key, value in latent.items() if key != "downscale_ratio_spacial"}
    result["samples"] = torch.from_numpy(unpack(to_vae_space(tokens, statistics), *grid))
    result[TOKENS_KEY] = torch.from_numpy(tokens)
    return result


def _samples(latent: dict[str, Any]) -> torch.Tensor:
    """``samples`` as ``[B, C, h, w]`` float32 on the CPU; a single frame loses its axis."""
    samples = latent["samples"]
    if samples.ndim == 5 and samples.shape[2] == 1:
        samples = samples[:, :, 0]
    if samples.ndim != 4:
        raise ContractError(f"latents have shape {list(samples.shape)}: this model draws single pictures, [B, C, h, w]")
    return samples.detach().to("cpu", torch.float32)


def _empty_grid(latent: dict[str, Any], samples: torch.Tensor) -> tuple[int, int]:
    channels = samples.shape[1]
    ratio = latent.get("downscale_ratio_spacial") or EMPTY_LATENT_PIXELS.get(channels)
    if ratio is None:
        known = ", ".join(map(str, EMPTY_LATENT_PIXELS))
        raise ContractError(f"an empty latent of {channels} channels: its size in pixels is known for {known}")
    height, width = (int(size * ratio) for size in samples.shape[2:])
    if height % PIXELS_PER_TOKEN or width % PIXELS_PER_TOKEN:
        raise ContractError(
            f"the empty latent stands for {width}x{height} pixels: both must be multiples of {PIXELS_PER_TOKEN}"
        )
    return height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN


def sample_with_progress(
    steps: Generator[Step, None, None], total: int, grid: tuple[int, int], preview: PreviewMap
) -> Ui:
    """Run the sampler to its end, showing each step and stopping within one when the user asks.

    Returns the node's ``ui`` output: how long it took.
    """
    bar, report = comfy.utils.ProgressBar(total), SamplingReport(total)
    stop_if_interrupted()
    with closing(steps):
        for done, step in enumerate(steps, start=1):
            bar.update_absolute(done, total, _preview(step.denoised, grid, preview))
            report.step(done)
            stop_if_interrupted()
    return report.ui


def _preview(tokens: np.ndarray, grid: tuple[int, int], preview: PreviewMap) -> tuple[str, Any, int] | None:
    """What ComfyUI's progress takes: nothing if previews are off, else a JPEG, as a browser expects, so no alpha.

    Newer versions of ComfyUI set the method anew for each prompt, so it is looked at each time.
    """
    if args.preview_method == LatentPreviewMethod.NoPreviews:
        return None
    picture = preview_picture(tokens, *grid, preview, args.preview_size)
    return "JPEG", picture, max(picture.size)


def stop_if_interrupted() -> None:
    comfy.model_management.throw_exception_if_processing_interrupted()


def to_pictures(images: Iterator[np.ndarray], total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decoded pictures to IMAGE (straight RGB), MASK (1 - alpha) and IMAGE (RGBA).

    Values are ``k / 255``: SaveImage truncates, and only that grid survives it unchanged.
    """
    bar = comfy.utils.ProgressBar(total)
    decoded = []
    for done, image in enumerate(images, start=1):
        decoded.append(to_rgba8(image))
        bar.update_absolute(done, total)
        stop_if_interrupted()
    rgba8 = np.concatenate(decoded)
    rgba = torch.from_numpy(to_unit(rgba8))
    return rgba[..., :3], torch.from_numpy(alpha_to_mask(rgba8)), rgba
