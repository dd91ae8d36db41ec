"""Reading a checkpoint in the layout of ``Qwen/Qwen-Image-2.1``, strictly."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..contract import ContractError
from ..graphs.dit import DiT, DiTConfig
from ..graphs.text_encoder import PRECISIONS, Precision, TextEncoder, TextEncoderConfig
from ..graphs.vae_decoder import VAEDecoder, VAEDecoderConfig
from ..schedule import SchedulerConfig

Config = TypeVar("Config")
Model = TypeVar("Model", bound=nn.Module)


def dit_config(checkpoint: Path) -> DiTConfig:
    return _config(DiTConfig.from_json, checkpoint / "transformer")


def load_dit(checkpoint: Path, compute_dtype: torch.dtype = torch.float32) -> DiT:
    """The DiT with bf16 weights."""
    return _fill(DiT(dit_config(checkpoint), compute_dtype), checkpoint / "transformer", torch.bfloat16)


def encoder_precision(compute: str) -> Precision:
    """The precision called ``compute``; raises ``ContractError`` for a name it does not know."""
    if compute not in PRECISIONS:
        raise ContractError(f"encoder compute is {compute!r}: choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[compute]


def load_text_encoder(checkpoint: Path, compute: str = "fp32") -> TextEncoder:
    """The text encoder with bf16 weights; the vision tower, the head and the final norm are left out.

    ``compute`` is one of ``PRECISIONS``: fp32, r32 or bf16.
    """
    precision = encoder_precision(compute)
    folder = checkpoint / "text_encoder"
    model = TextEncoder(_config(TextEncoderConfig.from_json, folder), precision)
    unused = r"model\.visual\.|lm_head\.|model\.language_model\.norm\."
    return _fill(model, folder, torch.bfloat16, prefix="model.language_model.", unused=unused)


def load_vae_decoder(checkpoint: Path, height: int, width: int) -> VAEDecoder:
    """The VAE's decoder in fp32 for a grid of ``height`` x ``width``; a still picture has no use for ``time_conv``."""
    folder = checkpoint / "vae"
    model = VAEDecoder(_config(VAEDecoderConfig.from_json, folder), height, width)
    return _fill(model, folder, torch.float32, unused=r"encoder\.|quant_conv\.|.*\.time_conv\.")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(
            f"cannot read {path} ({error}): the checkpoint must have the folders of Qwen/Qwen-Image-2.1"
        ) from error
    if not isinstance(content, dict):
        raise ContractError(f"{path} is not a JSON object")
    return content


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


def _fill(model: Model, folder: Path, dtype: torch.dtype, prefix: str = "", unused: str = r"(?!)") -> Model:
    """Give ``model`` the folder's tensors in ``dtype``: every parameter, and nothing unknown left over."""
    tensors = _read_tensors(folder, re.compile(unused), dtype)
    unknown = [name for name in tensors if not name.startswith(prefix)]
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    unknown += [prefix + name for name in named.keys() - expected.keys() if prefix + name not in unknown]
    missing = [prefix + name for name in expected.keys() - named.keys()]
    wrong = [
        f"{prefix + name} {list(named[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in named and named[name].shape != shape
    ]
    if unknown or missing or wrong:
        raise ContractError(
            f"{folder} does not fit its config.json: missing {some(missing)}; unknown {some(unknown)}; "
            f"of another shape {some(wrong)}"
        )
    model.load_state_dict(named, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def some(names: list[str]) -> str:
    """A list for a message, cut to eight."""
    names = sorted(names)
    return "none" if not names else ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_tensors(folder: Path, unused: re.Pattern[str], dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {}
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as shard:
                for name in sorted(shard.keys()):
                    if not unused.match(name):
                        tensors[name] = shard.get_tensor(name).to(dtype)
        except Exception as error:  # safetensors raises its own class for a damaged file, OSError for a missing one
            raise ContractError(f"cannot read {path} ({error}): download it again") from error
    return tensors


def _shards(folder: Path) -> list[Path]:
    """The files an ``*.safetensors.index.json`` lists, else the one safetensors file there is."""
    if indexes := sorted(folder.glob("*.safetensors.index.json")):
        weight_map = read_json(indexes[0]).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ContractError(f"{indexes[0]} has no weight_map: download it again")
        return [folder / name for name in sorted(set(weight_map.values()))]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if len(files) != 1:
        raise ContractError(f"{folder} holds {len(files)} safetensors files and no index: download it again")
    return files
