"""Noise, the packing of latents into tokens, and the two spaces latents live in.

*Model space* is what the sampler works in, about N(0, 1). *VAE space* is ``model * std + mean`` per
channel; it is what ComfyUI's LATENT carries, so native VAEs, upscalers and samplers can take it.
The VAE decoder graph takes model space and un-normalises inside itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .contract import LATENT_CHANNELS, ContractError

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class LatentStatistics:
    """Per-channel mean and standard deviation ``[64]`` of the VAE's latents, fp32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != LATENT_CHANNELS:
                raise ContractError(f"latent {name} has {len(values)} values, the model has {LATENT_CHANNELS} channels")
        if not all(value > 0 for value in self.std):
            raise ContractError("a latent standard deviation is not above 0")

    @classmethod
    def from_lists(cls, mean: Any, std: Any) -> "LatentStatistics":
        """From a bundle's metadata, which anything could have written."""
        for name, values in (("mean", mean), ("std", std)):
            if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
                raise ContractError(
                    f"the latent {name} in a VAE bundle's metadata is no list of numbers: export it again"
                )
        return cls(tuple(mean), tuple(std))


# latents_mean and latents_std of Qwen-Image-2.1's VAE config, as published with the checkpoint.
# fmt: off
QWEN_IMAGE_21 = LatentStatistics(
    mean=(
        0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722, 1.8873, -1.7177, -0.651, 0.2732, 0.7562,
        -0.6163, -1.0277, 3.8363, 2.021, 0.0472, 0.932, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464, -0.5236, 1.2826,
        3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955, -0.0342, -1.0265, -0.7636, 3.0555, 0.0746, -3.0751,
        -0.1076, 1.7376, -1.0914, -1.9435, -0.2784, -1.368, 0.4809, -0.4433, 0.3764, 0.5729, -2.0595, 1.096, -1.326,
        -2.0211, -5.0179, 0.5275, 4.0162, 1.8505, 0.3026, 1.9373, 1.4937, 0.2632, 0.5547, -1.7121, -0.1562, 0.0304,
    ),
    std=(
        3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.791, 3.0785, 3.65, 3.9308, 3.0904, 2.8778, 3.7675,
        3.732, 5.0756, 3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489, 3.4896, 3.8513, 3.9323, 3.4719,
        3.7498, 4.283, 3.5694, 4.2467, 3.9037, 3.2947, 5.077, 3.5075, 3.27, 3.4767, 2.8063, 5.1125, 3.5327, 4.7833,
        3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875, 3.9624, 4.0168, 3.5643, 4.055, 5.5614, 4.2963, 4.408, 3.4959,
        3.8747, 3.7608, 3.5735, 3.149, 3.7662, 3.6746, 3.4563, 3.8161,
    ),
)
# fmt: on


def initial_noise(
    seed: int, height: int, width: int, batch_size: int = 1, batch_index: Sequence[int] | None = None
) -> np.ndarray:
    """Standard normal noise ``[B, 64, height, width]`` on torch's CPU generator.

    One picture gets the numbers of ``torch.randn((1, 1, 64, h, w))``; a batch those of ComfyUI's
    ``prepare_noise``: one draw for the batch, or, with ``batch_index``, draw number ``i`` of a
    series of single draws for each index i.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ContractError(f"the seed is {seed}: it must be from 0 to {MAX_SEED}")
    if height < 1 or width < 1:
        raise ContractError(f"a {height} x {width} grid has no latents: both must be at least 1")
    if batch_size < 1:
        raise ContractError(f"the batch has {batch_size} latents: at least 1 is needed")
    generator = torch.Generator("cpu").manual_seed(seed)
    if batch_index is None:
        return torch.randn((batch_size, LATENT_CHANNELS, height, width), generator=generator).numpy()
    if len(batch_index) != batch_size or any(index < 0 for index in batch_index):
        raise ContractError(
            f"batch_index is {list(batch_index)} for a batch of {batch_size}: one index of 0 or more each"
        )
    draws: dict[int, np.ndarray] = {}
    for index in range(max(batch_index) + 1):
        draw = torch.randn((1, LATENT_CHANNELS, height, width), generator=generator)
        if index in batch_index:
            draws[index] = draw.numpy()
    return np.concatenate([draws[index] for index in batch_index])


def pack(z: np.ndarray) -> np.ndarray:
    """``[B, 64, h, w] -> [B, N, 64]``: one token per latent pixel, in raster order."""
    if z.ndim != 4 or z.shape[1] != LATENT_CHANNELS:
        raise ContractError(f"latents have shape {list(z.shape)}: pass [B, {LATENT_CHANNELS}, h, w]")
    return np.ascontiguousarray(z.reshape(z.shape[0], LATENT_CHANNELS, -1).transpose(0, 2, 1))


def unpack(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """``[B, N, 64] -> [B, 64, height, width]``."""
    if x.ndim != 3 or x.shape[1:] != (height * width, LATENT_CHANNELS):
        raise ContractError(
            f"tokens have shape {list(x.shape)}: "
            f"a {height} x {width} grid needs [B, {height * width}, {LATENT_CHANNELS}]"
        )
    return np.ascontiguousarray(x.transpose(0, 2, 1).reshape(x.shape[0], LATENT_CHANNELS, height, width))


def to_vae_space(x: np.ndarray, statistics: LatentStatistics = QWEN_IMAGE_21) -> np.ndarray:
    """Model space to VAE space, ``x * std + mean`` in fp32; tokens ``[B, N, 64]`` or latents ``[B, 64, h, w]``."""
    mean, std = _channel_values(x, statistics)
    return x * std + mean


def from_vae_space(z: np.ndarray, statistics: LatentStatistics = QWEN_IMAGE_21) -> np.ndarray:
    """VAE space to model space, ``(z - mean) / std`` in fp32; tokens ``[B, N, 64]`` or latents ``[B, 64, h, w]``."""
    mean, std = _channel_values(z, statistics)
    return (z - mean) / std


def _channel_values(x: np.ndarray, statistics: LatentStatistics) -> list[np.ndarray]:
    """Mean and standard deviation, shaped to the channel axis of ``x``."""
    if not (x.ndim == 3 and x.shape[2] == LATENT_CHANNELS) and not (x.ndim == 4 and x.shape[1] == LATENT_CHANNELS):
        raise ContractError(
            f"latents have shape {list(x.shape)}: "
            f"pass tokens [B, N, {LATENT_CHANNELS}] or latents [B, {LATENT_CHANNELS}, h, w]"
        )
    shape = (-1,) if x.ndim == 3 else (-1, 1, 1)
    return [np.asarray(values, dtype=np.float32).reshape(shape) for values in (statistics.mean, statistics.std)]
