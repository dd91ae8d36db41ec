"""The last step: float pictures to 8-bit RGBA, alpha to mask, and a picture on a background."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from .contract import IMAGE_CHANNELS, ContractError


def to_rgba8(image: np.ndarray) -> np.ndarray:
    """``[B, 4, H, W]`` in [-1, 1] to uint8 ``[B, H, W, 4]``: ``round(clip(x * 0.5 + 0.5, 0, 1) * 255)``.

    RGB is straight, not premultiplied. Raises ``ContractError`` for another shape or for NaN.
    """
    if image.ndim != 4 or image.shape[1] != IMAGE_CHANNELS:
        raise ContractError(f"the picture has shape {list(image.shape)}: pass [B, {IMAGE_CHANNELS}, H, W]")
    if np.isnan(image).any():
        raise ContractError(f"the picture has {np.count_nonzero(np.isnan(image))} NaN values: the latents are damaged")
    scaled = np.clip(image.astype(np.float32, copy=False) * np.float32(0.5) + np.float32(0.5), 0, 1) * np.float32(255)
    return np.ascontiguousarray(np.round(scaled).astype(np.uint8).transpose(0, 2, 3, 1))  # BCHW -> BHWC


def to_unit(rgba8: np.ndarray) -> np.ndarray:
    """uint8 to float32 ``k / 255``: the grid whose values survive a truncation to 8 bits unchanged."""
    return rgba8.astype(np.float32) / np.float32(255)


@cache
def _mask_values() -> np.ndarray:
    """The mask of each alpha byte: the float32 nearest to ``1 - k / 255`` whose inverse truncates to k.

    Rounding alone is not enough: ``1 - (1 - k / 255)`` falls just below the grid for most k, and
    ComfyUI's SaveImage, which truncates, would write k - 1.
    """
    alpha = np.arange(256)
    mask = np.float32(1) - to_unit(alpha)
    while (low := np.trunc((np.float32(1) - mask) * np.float32(255)) < alpha).any():
        mask[low] = np.nextafter(mask[low], np.float32(0))
    return mask


def alpha_to_mask(rgba8: np.ndarray) -> np.ndarray:
    """uint8 ``[B, H, W, 4]`` to a float32 mask ``[B, H, W]``, 1 - alpha: 1 where transparent, as in ComfyUI."""
    _check_rgba8(rgba8)
    return _mask_values()[rgba8[..., 3]]


def composite(rgba8: np.ndarray, colour: Sequence[int] = (255, 255, 255)) -> np.ndarray:
    """uint8 ``[B, H, W, 4]`` laid on an opaque ``colour``, uint8 ``[B, H, W, 3]``."""
    _check_rgba8(rgba8)
    if len(colour) != 3 or not all(0 <= value <= 255 for value in colour):
        raise ContractError(f"the colour is {tuple(colour)}: pass three values from 0 to 255")
    return _over(rgba8, np.asarray(colour, dtype=np.float32))


def on_checkerboard(rgba8: np.ndarray, square: int = 16) -> np.ndarray:
    """uint8 ``[B, H, W, 4]`` on the grey checkerboard that stands for transparency, uint8 ``[B, H, W, 3]``."""
    _check_rgba8(rgba8)
    rows, columns = np.indices(rgba8.shape[1:3]) // square
    board = np.where((rows + columns) % 2, np.float32(153), np.float32(204))
    return _over(rgba8, board[None, :, :, None])


def _check_rgba8(rgba8: np.ndarray) -> None:
    if rgba8.dtype != np.uint8 or rgba8.ndim != 4 or rgba8.shape[3] != IMAGE_CHANNELS:
        raise ContractError(f"the picture is {rgba8.dtype} {list(rgba8.shape)}: pass uint8 [B, H, W, {IMAGE_CHANNELS}]")


def _over(rgba8: np.ndarray, background: np.ndarray) -> np.ndarray:
    rgb, alpha = rgba8[..., :3].astype(np.float32), rgba8[..., 3:].astype(np.float32) / 255
    return np.round(rgb * alpha + background * (1 - alpha)).astype(np.uint8)
