"""Checkpoints with the real block shapes, random weights and as many blocks as asked, streamed to disk.

Only what an export of one component reads. Neither diffusers nor memory for the weights is needed.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from coreai_rgba_image.host.export.stored import EmptyOnMeta
from coreai_rgba_image.host.graphs.dit import DiT, DiTConfig
from coreai_rgba_image.host.graphs.text_encoder import TextEncoder, TextEncoderConfig
from coreai_rgba_image.host.graphs.vae_decoder import VAEDecoder, VAEDecoderConfig
from coreai_rgba_image.host.latents import QWEN_IMAGE_21

SHARD_BYTES = 2_000_000_000
CHUNK = 1 << 22
"""Values that are made at a time."""

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_dit(checkpoint: Path, blocks: int, heads: int = 32) -> Path:
    """The published shapes; 32 blocks are 14.2 GB, one is 0.44 GB. Fewer heads make it narrower."""
    config = DiTConfig(num_layers=blocks, num_attention_heads=heads, attention_head_dim=128, context_in_dim=4096)
    with EmptyOnMeta():
        model = DiT(config)
    return _write(checkpoint / "transformer", model, torch.bfloat16, asdict(config))


def write_text_encoder(checkpoint: Path, layers: int, vocabulary: int = 151_936) -> Path:
    """The published shapes; 36 layers are 15.1 GB, one is 0.39 GB, the embedding 1.24 GB."""
    config = TextEncoderConfig(
        vocab_size=vocabulary, hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, rope_theta=5e6,
    )  # fmt: skip
    with EmptyOnMeta():
        model = TextEncoder(config)
    settings = {"text_config": asdict(config)}
    return _write(checkpoint / "text_encoder", model, torch.bfloat16, settings, "model.language_model.")


def write_vae(checkpoint: Path, base: int = 144) -> Path:
    """The published shapes at a ``base`` of 144, 1.0 GB; the size grows with its square."""
    config = VAEDecoderConfig(
        base_dim=96, decoder_base_dim=base, z_dim=64, dim_mult=(1, 2, 4, 8, 8), num_res_blocks=2,
        temperal_downsample=(False, True, True, True), latents_mean=QWEN_IMAGE_21.mean, latents_std=QWEN_IMAGE_21.std,
    )  # fmt: skip
    with EmptyOnMeta():
        model = VAEDecoder(config, 2, 2)
    return _write(checkpoint / "vae", model, torch.float32, asdict(config))


def _write(folder: Path, model: nn.Module, dtype: torch.dtype, config: dict[str, Any], prefix: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map = {}
    for number, names in enumerate(_shards(model, dtype)):
        shard = f"model-{number + 1}.safetensors"
        _write_shard(folder / shard, {prefix + name: model.get_parameter(name).shape for name in names}, dtype, number)
        weight_map.update({prefix + name: shard for name in names})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder.parent


def _shards(model: nn.Module, dtype: torch.dtype) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * dtype.itemsize
        if names and held + size > SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _write_shard(path: Path, shapes: dict[str, torch.Size], dtype: torch.dtype, seed: int) -> None:
    """A safetensors file: the length of its header, the header, and the values in the header's order."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for values in _random_values(shape, random):
                file.write(values.to(dtype).view(torch.uint8).numpy().tobytes())


def _random_values(shape: torch.Size, random: np.random.Generator) -> Iterator[torch.Tensor]:
    """Weights that keep the scale of what passes through them, scales near 1."""
    count, fan_in = math.prod(shape), math.prod(shape[1:])
    for start in range(0, count, CHUNK):
        noise = torch.from_numpy(random.standard_normal(min(CHUNK, count - start), dtype=np.float32))
        yield noise * fan_in**-0.5 if fan_in > 1 else 1 + 0.1 * noise
