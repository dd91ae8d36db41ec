"""The linear map that previews of a model set are drawn with, fitted to the checkpoint's own VAE.

Least squares from latents, 64 numbers a token, to the mean RGBA of the 16 x 16 pixels the decoder
makes of them. The latents are those of pictures a program draws: on latents drawn from a normal
distribution, whatever their spatial scale, the fit misses what a sampler's latents decode to.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import avg_pool2d

from ..contract import IMAGE_CHANNELS, PIXELS_PER_TOKEN
from ..files import remembered
from ..preview import PREVIEW_KEY, PreviewMap
from .checkpoint import VAE_FOLDER, has_vae_encoder, load_vae_decoder, load_vae_encoder
from .stored import shards

METHOD = "preview map 1"
"""Under this name the result is remembered; another number where another fit replaces this one."""
PICTURES, GRID = 16, 8
MOST_DISCS = 4
CONTRAST = 1.6
"""How far apart the colours are: above 1 many are cut at the ends, as pure colours are common in pictures."""
SLOPE = 0.3


def preview_metadata(checkpoint: Path) -> dict[str, list[list[float]]]:
    """What a VAE bundle says about previews: nothing if the checkpoint lacks the encoder that the fit needs."""
    if not has_vae_encoder(checkpoint):
        return {}
    weights = shards(checkpoint / VAE_FOLDER)[0]
    return {PREVIEW_KEY: remembered(weights, METHOD, lambda: fit_preview(checkpoint).to_lists())}


@torch.inference_mode()
def fit_preview(checkpoint: Path) -> PreviewMap:
    """The map for the VAE of ``checkpoint``; a quarter of a megapixel is encoded and decoded for it."""
    latents = _encoded(checkpoint)
    decoder = load_vae_decoder(checkpoint, GRID, GRID)
    means = [avg_pool2d(decoder(tokens).clamp(-1, 1), PIXELS_PER_TOKEN) for tokens in latents]
    known = torch.cat(latents).flatten(0, 1).double().numpy()  # BNC -> (BN)C
    colours = torch.cat(means).flatten(2).transpose(1, 2).flatten(0, 1).double().numpy()  # BChw -> (BN)C
    weights, *_ = np.linalg.lstsq(np.hstack([known, np.ones((len(known), 1))]), colours, rcond=None)
    return PreviewMap(weights.astype(np.float32))


def _encoded(checkpoint: Path) -> list[torch.Tensor]:
    """Model-space latents ``[1, N, 64]`` of each picture; the encoder is gone before the decoder is loaded."""
    encoder = load_vae_encoder(checkpoint)
    return [encoder(torch.from_numpy(picture[None])) for picture in sample_pictures(PICTURES)]


def sample_pictures(count: int) -> np.ndarray:
    """Pictures ``[count, 4, H, W]`` in [-1, 1]: discs, solid and glass, on nothing or on a colour, all shaded."""
    random = np.random.default_rng(0)
    side = GRID * PIXELS_PER_TOKEN
    rows, columns = np.indices((side, side), dtype=np.float32) / side
    pictures = np.empty((count, IMAGE_CHANNELS, side, side), dtype=np.float32)
    for picture in pictures:
        picture[:] = _colour(random, alpha=float(random.integers(2)))
        for _ in range(random.integers(1, MOST_DISCS + 1)):
            row, column, radius = random.random(3) * [1, 1, 0.35] + [0, 0, 0.1]
            inside = (rows - row) ** 2 + (columns - column) ** 2 < radius**2
            alpha = random.random() if random.random() < 0.2 else 1
            picture[:, inside] = _colour(random, alpha)[:, 0]
        down, right = random.normal(0, SLOPE, (2, 3, 1, 1))
        picture[:3] = np.clip(picture[:3] + down * rows + right * columns, 0, 1)
    return pictures * 2 - 1


def _colour(random: np.random.Generator, alpha: float) -> np.ndarray:
    """Straight RGBA in [0, 1], ``[4, 1, 1]``."""
    rgb = np.clip((random.random(3) - 0.5) * CONTRAST + 0.5, 0, 1)
    return np.append(rgb, alpha)[:, None, None]
