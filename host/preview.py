"""A rough picture straight from latents, shown while the sampler works; no VAE is run for it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .contract import IMAGE_CHANNELS, LATENT_CHANNELS, PIXELS_PER_TOKEN, ContractError
from .pixels import on_checkerboard, to_rgba8

if TYPE_CHECKING:
    from PIL import Image

PREVIEW_KEY = "latents_to_rgba"
"""Where a VAE bundle's metadata has the weights of its ``PreviewMap``, row by row."""

# A linear map from model-space latents of this VAE to RGB in [-1, 1], published with ComfyUI 0.38
# for Qwen-Image-2.1: rgb = latents @ FACTORS + BIAS.
# fmt: off
FACTORS = np.array([
    [-0.0158, -0.0115, -0.0174], [0.003, 0.012, 0.0027], [0.0637, 0.047, -0.0127], [0.036, 0.0661, -0.003],
    [0.0159, 0.0181, 0.0082], [0.0132, 0.0326, 0.0169], [0.0191, 0.0261, 0.0136], [-0.0146, -0.0276, -0.0361],
    [0.0187, -0.0024, -0.0072], [-0.1059, -0.009, 0.035], [-0.0195, -0.0226, -0.0138], [-0.0295, 0.0024, -0.0215],
    [0.0191, -0.0393, -0.0001], [-0.0144, -0.0166, -0.0272], [0.0389, 0.043, 0.0445], [-0.0153, -0.0336, 0.0031],
    [0.0339, 0.0122, 0.022], [-0.0136, -0.0078, -0.012], [-0.034, -0.0282, -0.0245], [-0.0133, -0.0176, -0.0133],
    [0.0109, -0.0087, 0.0096], [-0.001, 0.0044, 0.0016], [0.0301, 0.0053, 0.0361], [-0.0281, -0.0205, -0.0032],
    [-0.0725, 0.0002, 0.016], [-0.0036, 0.0158, 0.0807], [0.0087, 0.004, -0.0053], [-0.026, 0.0183, -0.0077],
    [-0.0039, -0.0035, -0.0107], [-0.0026, 0.0172, 0.0237], [0.0088, 0.0078, 0.0078], [-0.0087, -0.031, -0.0122],
    [-0.0027, 0.0018, 0.0094], [-0.0064, 0.0292, -0.0256], [0.0594, 0.1049, 0.118], [0.0103, -0.0103, -0.0026],
    [-0.0091, 0.0025, -0.0015], [0.0178, 0.0243, 0.0292], [-0.0063, -0.0012, 0.0202], [0.0452, 0.0246, 0.0143],
    [0.0149, 0.027, 0.0052], [0.1484, 0.0801, 0.0804], [-0.012, 0.004, 0.001], [0.0181, 0.0051, -0.0021],
    [0.0132, 0.005, 0.0019], [0.0291, 0.002, 0.0092], [0.0066, -0.041, -0.1314], [-0.1153, -0.0629, -0.0802],
    [0.0258, 0.0378, 0.0298], [0.0375, 0.1139, 0.0468], [-0.0142, -0.0126, -0.0276], [0.0339, 0.0153, 0.0138],
    [0.0346, 0.0211, 0.0267], [0.0369, -0.0431, -0.0993], [-0.0052, -0.0092, 0.0056], [-0.0279, 0.041, -0.0357],
    [0.0036, 0.0017, -0.0083], [-0.0441, -0.0367, -0.0454], [-0.0001, -0.0092, -0.0001], [-0.0222, -0.0183, -0.0051],
    [0.0039, 0.0053, -0.0184], [-0.0094, -0.0075, -0.0143], [-0.0066, -0.0088, -0.0063], [0.022, 0.0074, 0.01],
], dtype=np.float32)
BIAS = np.array([-0.1228, -0.1869, -0.3083], dtype=np.float32)
# fmt: on


@dataclass(frozen=True, eq=False)
class PreviewMap:
    """A linear map from model-space latents of one VAE to RGBA in [-1, 1]: ``weights [65, 4]``, the last row a bias."""

    weights: np.ndarray

    def __post_init__(self) -> None:
        shape = [LATENT_CHANNELS + 1, IMAGE_CHANNELS]
        if list(self.weights.shape) != shape or not np.isfinite(self.weights).all():
            raise ContractError(f"a preview map of shape {list(self.weights.shape)}: pass {shape} finite numbers")

    @classmethod
    def from_lists(cls, rows: Any) -> "PreviewMap":
        """From a bundle's metadata, which anything could have written."""
        try:
            return cls(np.array(rows, dtype=np.float32))
        except (TypeError, ValueError) as error:
            raise ContractError(f"the preview map of a VAE bundle is damaged ({error}): export it again") from error

    def to_lists(self) -> list[list[float]]:
        """For a bundle's metadata: four decimals, of which none shows in 8 bits."""
        return self.weights.astype(np.float64).round(4).tolist()

    def rgba(self, tokens: np.ndarray, height: int, width: int) -> np.ndarray:
        """Tokens of one picture ``[1, N, 64]`` to straight RGBA, uint8 ``[height, width, 4]``: a pixel per token."""
        if tokens.shape != (1, height * width, LATENT_CHANNELS):
            raise ContractError(
                f"tokens have shape {list(tokens.shape)}, a {height} x {width} grid has {height * width}"
            )
        values = tokens @ self.weights[:-1] + self.weights[-1]
        return to_rgba8(values.transpose(0, 2, 1).reshape(1, IMAGE_CHANNELS, height, width))[0]


def _opaque(factors: np.ndarray, bias: np.ndarray) -> PreviewMap:
    alpha = np.zeros((LATENT_CHANNELS + 1, 1), dtype=np.float32)
    alpha[-1] = 1
    return PreviewMap(np.hstack([np.vstack([factors, bias]), alpha]))


QWEN_IMAGE_21_PREVIEW = _opaque(FACTORS, BIAS)
"""For a model set whose VAE bundles name no map of their own, as the published one: without alpha."""


def preview_picture(tokens: np.ndarray, height: int, width: int, preview: PreviewMap, longest: int) -> "Image.Image":
    """Tokens of one picture ``[1, N, 64]`` to RGB on a checkerboard, the longer side ``longest`` pixels or its own.

    Enlarged before it is laid on the board, which stays sharp that way.
    """
    from PIL import Image

    scale = min(PIXELS_PER_TOKEN, longest / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    rgba = Image.fromarray(preview.rgba(tokens, height, width)).resize(size, Image.Resampling.BILINEAR)
    picture = _checkerboard(size).copy()
    picture.paste(rgba, mask=rgba)
    return picture


@lru_cache(maxsize=4)
def _checkerboard(size: tuple[int, int]) -> "Image.Image":
    from PIL import Image

    width, height = size
    return Image.fromarray(on_checkerboard(np.zeros((1, height, width, IMAGE_CHANNELS), dtype=np.uint8))[0])
