"""A picture of a size that no decoder draws, from overlapping tiles that one does. Grids are in latent tokens.

What a decoder draws near a tile's edge lacks what lies beyond it. So tiles overlap, and where they do
each counts for nothing at its own edge, and fully where the other begins to.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from .contract import IMAGE_CHANNELS, PIXELS_PER_TOKEN, ContractError
from .latents import pack, unpack

Grid = tuple[int, int]
"""(height, width)."""

ANY_TILE: Grid = (1 << 20, 1 << 20)
"""As the largest tile: as large as there are."""

OVERLAP = 8
"""Tokens by which neighbours overlap at least: the outermost three or four of a tile are drawn wrongly."""


def choose_tile(tiles: Iterable[Grid], grid: Grid, largest: Grid = ANY_TILE) -> Grid:
    """Of the ``tiles`` that are no larger than ``largest``, the one that draws ``grid`` best.

    That is its own size, else one that fits into it, else any; and of those the one that covers it
    with the fewest. Raises ``ContractError`` if there is none.
    """
    known = list(tiles)
    allowed = [tile for tile in known if tile[0] <= largest[0] and tile[1] <= largest[1]]
    if not allowed:
        sizes = ", ".join(f"{width * PIXELS_PER_TOKEN}x{height * PIXELS_PER_TOKEN}" for height, width in known)
        raise ContractError(
            f"no tile is as small as {largest[1] * PIXELS_PER_TOKEN}x{largest[0] * PIXELS_PER_TOKEN} pixels: the VAE "
            f"decoders of this model set draw {sizes or 'none'}. Set the tile size to the side of one of them or more"
        )

    def order(tile: Grid) -> tuple[bool, bool, int, int]:
        reaches_beyond = tile[0] > grid[0] or tile[1] > grid[1]
        return tile != grid, reaches_beyond, len(placed(grid, tile)), tile[0] * tile[1]

    return min(allowed, key=order)


def placed(grid: Grid, tile: Grid) -> list[Grid]:
    """Where the tiles' upper left corners are, row by row; only a tile larger than ``grid`` reaches beyond it."""
    rows, columns = (_starts(size, length) for size, length in zip(grid, tile, strict=True))
    return [(row, column) for row in rows for column in columns]


def _starts(size: int, length: int) -> list[int]:
    overlap = _overlap(length)
    count = max(1, math.ceil((size - overlap) / (length - overlap)))
    return [round(index * (size - length) / (count - 1)) for index in range(count)] if count > 1 else [0]


def _overlap(length: int) -> int:
    return min(OVERLAP, length // 2)


def decode_tiled(decode: Callable[[np.ndarray], np.ndarray], tokens: np.ndarray, grid: Grid, tile: Grid) -> np.ndarray:
    """The picture ``[1, 4, 16 h, 16 w]`` of ``tokens [1, N, 64]`` on ``grid``, with a decoder of the size ``tile``.

    A grid of the tile's own size is decoded whole, bit for bit. One that is smaller is continued with
    its outermost tokens.
    """
    if grid == tile:
        return decode(tokens)
    latents = unpack(tokens, *grid)
    beyond = [max(0, length - size) for size, length in zip(grid, tile, strict=True)]
    latents = np.pad(latents, ((0, 0), (0, 0), (0, beyond[0]), (0, beyond[1])), mode="edge")
    height, width = (size * PIXELS_PER_TOKEN for size in latents.shape[2:])
    picture = np.zeros((1, IMAGE_CHANNELS, height, width), dtype=np.float32)
    total = np.zeros((height, width), dtype=np.float32)
    for row, column in placed(grid, tile):
        cut = latents[:, :, row : row + tile[0], column : column + tile[1]]
        weight = np.outer(*map(_weights, (row, column), tile, latents.shape[2:]))
        rows, columns = (
            slice(start * PIXELS_PER_TOKEN, (start + length) * PIXELS_PER_TOKEN)
            for start, length in zip((row, column), tile, strict=True)
        )
        picture[..., rows, columns] += decode(pack(cut)) * weight
        total[rows, columns] += weight
    return (picture / total)[..., : grid[0] * PIXELS_PER_TOKEN, : grid[1] * PIXELS_PER_TOKEN]


def _weights(start: int, length: int, size: int) -> np.ndarray:
    """How much each pixel counts along a tile of ``length`` tokens at ``start`` of ``size``.

    Nothing in the outer quarter of the overlap, all from three quarters on; there is no overlap at
    the picture's own ends.
    """
    pixels = length * PIXELS_PER_TOKEN
    overlap = _overlap(length) * PIXELS_PER_TOKEN
    position = np.arange(pixels, dtype=np.float32) + 0.5
    share = np.ones(pixels, dtype=np.float32)
    for is_inside, distance in ((start > 0, position), (start + length < size, position[::-1])):
        if is_inside:
            share = np.minimum(share, np.clip((distance - overlap / 4) / (overlap / 2), 0, 1))
    return share**2 * (3 - 2 * share)
