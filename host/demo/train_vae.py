"""Stage one: the autoencoder that turns 16x16 pixel tiles of RGBA into 64 latent channels and back.

It sees crops of full-size pictures, because a tile of a 256 or 512 canvas holds an edge at most,
never a whole small picture. Noise on the latents makes the decoder forgive a sampler that is
slightly off, and gives each channel a scale.
"""

import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from .captions import random_scene
from .pictures import draw, random_placement
from .progress import AveragedWeights, TrainingState, learning_rate_scale

LATENT_CHANNELS = 64
LATENT_NOISE = 0.25
PENALTY = 1e-3
LEARNING_RATE = 2e-3
SAVE_EVERY = 200

POOL = ((256, 256, 500), (512, 512, 120), (256, 384, 60), (384, 256, 60), (128, 128, 150))
"""Height, width and number of the pictures that crops are taken from."""

CROPS = ((64, 32), (64, 32), (64, 32), (128, 8))
"""Side and batch size of the crops, taken in turn."""

CONFIG = {
    "base_dim": 8,
    "decoder_base_dim": 8,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 4, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True, True],
}
"""The published VAE's structure (five levels, 16x, temporal flags) at a hundredth of its size."""


def new_vae(seed: int) -> AutoencoderKLQwenImage21:
    torch.manual_seed(seed)
    neutral = {"latents_mean": [0.0] * LATENT_CHANNELS, "latents_std": [1.0] * LATENT_CHANNELS}
    return AutoencoderKLQwenImage21(**CONFIG, **neutral)


def to_unit(rgba: NDArray[np.uint8]) -> Tensor:
    """8-bit ``[B, H, W, 4]`` to ``[B, 4, H, W]`` in [-1, 1]."""
    return torch.from_numpy(rgba).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def encode(vae: AutoencoderKLQwenImage21, image: Tensor) -> Tensor:
    """Posterior mean in VAE space, ``[B, 4, H, W] -> [B, 64, h, w]``."""
    return vae.quant_conv(vae.encoder(image.unsqueeze(2)))[:, :LATENT_CHANNELS, 0]


def decode(vae: AutoencoderKLQwenImage21, latents: Tensor) -> Tensor:
    """``[B, 64, h, w]`` to an image that is not clamped, so that every pixel has a gradient."""
    return vae.decoder(vae.post_quant_conv(latents.unsqueeze(2)), first_chunk=True)[:, :, 0]


def picture_pool(seed: int) -> list[NDArray[np.uint8]]:
    rng = random.Random(seed)
    pictures = []
    for height, width, count in tqdm(POOL, desc="drawing", unit="size"):
        for _ in range(count):
            scene = random_scene(rng, held_out=False)
            pictures.append(draw(scene, random_placement(scene, rng), height, width))
    return pictures


def random_crops(pool: list[NDArray[np.uint8]], side: int, count: int, rng: random.Random) -> NDArray[np.uint8]:
    """Crops on random pixels; three of four flat ones are drawn again, as edges are what is hard."""
    crops: list[NDArray[np.uint8]] = []
    while len(crops) < count:
        picture = rng.choice(pool)
        top, left = (rng.randint(0, length - side) for length in picture.shape[:2])
        crop = picture[top : top + side, left : left + side]
        if rng.random() < 0.25 or (crop != crop[0, 0]).any():
            crops.append(crop)
    return np.stack(crops)


def reconstruction_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """Colour counts as much as it is seen (alpha), and a little where nothing is seen; alpha counts everywhere."""
    difference = made - wanted
    error = difference.abs() + 2.0 * difference.square()
    seen = 0.15 + 0.85 * (wanted[:, 3:] * 0.5 + 0.5)
    return (error[:, :3] * seen).mean() + error[:, 3:].mean()


def train_vae(folder: Path, steps: int, seed: int) -> TrainingState:
    """Train, or go on training, the autoencoder whose state is kept in ``folder``."""
    vae = new_vae(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=1e-3)
    state = TrainingState(folder / "vae.pt", vae, [optimizer], AveragedWeights.of(vae))
    state.load_if_there()
    if state.step >= steps:
        return state
    pool = picture_pool(seed)
    bar = tqdm(range(state.step, steps), initial=state.step, total=steps, desc="autoencoder")
    for step in bar:
        rng = random.Random(seed * 1_000_003 + step)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        side, count = CROPS[step % len(CROPS)]
        image = to_unit(random_crops(pool, side, count, rng))
        latents = encode(vae, image)
        noisy = latents + LATENT_NOISE * torch.randn(latents.shape, generator=generator)
        loss = reconstruction_loss(decode(vae, noisy), image) + PENALTY * latents.square().mean()
        loss.backward()
        state.advance(loss.item(), learning_rate_scale(step, steps), [LEARNING_RATE])
        bar.set_postfix(loss=f"{np.mean(state.losses[-50:]):.4f}")
        if state.step % SAVE_EVERY == 0 or state.step == steps:
            state.save()
    return state
