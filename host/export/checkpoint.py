"""Reading a checkpoint in the layout of ``Qwen/Qwen-Image-2.1``, strictly.

Each ``load_*`` makes a network with the checkpoint's weights; with ``stand_ins`` one to be exported
and not to be run, whose weights are read when they are needed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..contract import ContractError
from ..graphs.dit import DiT, DiTConfig
from ..graphs.text_encoder import PRECISIONS, Precision, TextEncoder, TextEncoderConfig
from ..graphs.vae_decoder import VAEDecoder, VAEDecoderConfig
from ..graphs.vae_encoder import VAEEncoder
from ..schedule import SchedulerConfig
from .stored import EmptyOnMeta, StandIns, StoredTensor, read_json, stored_tensors

Config = TypeVar("Config")
Model = TypeVar("Model", bound=nn.Module)

DIT_FOLDER, TEXT_ENCODER_FOLDER, VAE_FOLDER = "transformer", "text_encoder", "vae"


def dit_config(checkpoint: Path) -> DiTConfig:
    return _config(DiTConfig.from_json, checkpoint / DIT_FOLDER)


def load_dit(
    checkpoint: Path, compute_dtype: torch.dtype = torch.float32, stand_ins: StandIns | None = None
) -> DiT:  # fmt: skip
    """The DiT with bf16 weights."""
    config = dit_config(checkpoint)
    return _fill(lambda: DiT(config, compute_dtype), checkpoint / DIT_FOLDER, torch.bfloat16, stand_ins)


def encoder_precision(compute: str) -> Precision:
    """The precision called ``compute``; raises ``ContractError`` for a name it does not know."""
    if compute not in PRECISIONS:
        raise ContractError(f"encoder compute is {compute!r}: choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[compute]


def load_text_encoder(checkpoint: Path, compute: str = "fp32", stand_ins: StandIns | None = None) -> TextEncoder:
    """The text encoder with bf16 weights; the vision tower, the head and the final norm are left out.

    ``compute`` is one of ``PRECISIONS``: fp32, r32 or bf16.
    """
    precision = encoder_precision(compute)
    folder = checkpoint / TEXT_ENCODER_FOLDER
    config = _config(TextEncoderConfig.from_json, folder)
    unused = r"model\.visual\.|lm_head\.|model\.language_model\.norm\."
    return _fill(
        lambda: TextEncoder(config, precision), folder, torch.bfloat16, stand_ins, "model.language_model.", unused
    )


def load_vae_decoder(checkpoint: Path, height: int, width: int, stand_ins: StandIns | None = None) -> VAEDecoder:
    """The VAE's decoder in fp32 for a grid of ``height`` x ``width``; a still picture has no use for ``time_conv``."""
    folder = checkpoint / VAE_FOLDER
    config = _config(VAEDecoderConfig.from_json, folder)
    unused = r"encoder\.|quant_conv\.|.*\.time_conv\."
    return _fill(lambda: VAEDecoder(config, height, width), folder, torch.float32, stand_ins, unused=unused)


def has_vae_encoder(checkpoint: Path) -> bool:
    """Whether the VAE's encoder is there too, which no bundle needs."""
    return any(name.startswith("encoder.") for name in stored_tensors(checkpoint / VAE_FOLDER, re.compile(r"(?!)")))


def load_vae_encoder(checkpoint: Path) -> VAEEncoder:
    """The VAE's encoder in fp32, for still pictures."""
    folder = checkpoint / VAE_FOLDER
    config = _config(VAEDecoderConfig.from_json, folder)
    unused = r"decoder\.|post_quant_conv\.|.*\.time_conv\."
    return _fill(lambda: VAEEncoder(config), folder, torch.float32, None, unused=unused)


def checkpoint_scheduler(checkpoint: Path) -> SchedulerConfig:
    """A checkpoint's settings. The fixed sigmas of a few-step one are the pipeline's: ``model_index.json`` has them."""
    fixed = read_json(checkpoint / "model_index.json").get("sample_sigmas")
    settings = read_json(checkpoint / "scheduler" / "scheduler_config.json")
    return SchedulerConfig.from_json({**settings, "sample_sigmas": fixed})


def _config(from_json: Callable[[dict[str, Any]], Config], folder: Path) -> Config:
    path = folder / "config.json"
    try:
        return from_json(read_json(path))
    except (TypeError, KeyError) as error:
        raise ContractError(f"{path} lacks what this graph needs: {error}") from error


def _fill(
    build: Callable[[], Model], folder: Path, dtype: torch.dtype, stand_ins: StandIns | None, prefix: str = "",
    unused: str = r"(?!)",
) -> Model:  # fmt: skip
    """A model with the folder's tensors in ``dtype``: every parameter, and nothing unknown left over."""
    with EmptyOnMeta():
        model = build()
    stored = stored_tensors(folder, re.compile(unused))
    expected = {prefix + name: parameter.shape for name, parameter in model.named_parameters()}
    missing, unknown = [*(expected.keys() - stored.keys())], [*(stored.keys() - expected.keys())]
    wrong = [
        f"{name} {list(stored[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if unknown or missing or wrong:
        raise ContractError(
            f"{folder} does not fit its config.json: missing {some(missing)}; unknown {some(unknown)}; "
            f"of another shape {some(wrong)}"
        )
    take = StoredTensor.read if stand_ins is None else stand_ins.add
    named = {name.removeprefix(prefix): take(tensor, dtype) for name, tensor in stored.items()}
    model.load_state_dict(named, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def some(names: list[str]) -> str:
    """A list for a message, cut to eight."""
    names = sorted(names)
    return "none" if not names else ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
