"""Where tiles go, and how near the picture made of them is to the one decoded whole."""

import numpy as np
import pytest

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.latents import initial_noise, pack, unpack
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.pipeline import decode, encode_prompt
from coreai_rgba_image.host.sampling import Sampling, Settings
from coreai_rgba_image.host.tiling import Grid, choose_tile, decode_tiled, placed


def nearest(tokens: np.ndarray) -> np.ndarray:
    """A decoder that sees one token at a time: its first four channels, 16 pixels large. Tiles cannot show."""
    height, width = TILE
    pixels = tokens[0, :, :4].T.reshape(1, 4, height, width)
    return pixels.repeat(16, axis=2).repeat(16, axis=3)


TILE = (8, 12)


@pytest.mark.parametrize("grid", [(8, 12), (8, 13), (13, 12), (30, 41), (5, 12), (3, 4), (5, 40)])
def test_every_pixel_is_its_own_decoders(grid: Grid) -> None:
    tokens = pack(initial_noise(1, *grid))
    height, width = grid
    expected = tokens[0, :, :4].T.reshape(1, 4, height, width).repeat(16, axis=2).repeat(16, axis=3)
    result = decode_tiled(nearest, tokens, grid, TILE)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("grid", [(8, 12), (9, 12), (30, 41), (64, 64)])
def test_tiles_cover_the_picture_and_overlap_enough(grid: Grid) -> None:
    corners = placed(grid, TILE)
    covered = np.zeros(grid, dtype=int)
    for row, column in corners:
        assert 0 <= row <= grid[0] - TILE[0]
        assert 0 <= column <= grid[1] - TILE[1]
        covered[row : row + TILE[0], column : column + TILE[1]] += 1
    assert covered.min() == 1
    for axis in (0, 1):
        starts = sorted({corner[axis] for corner in corners})
        overlaps = TILE[axis] - np.diff(starts)
        assert (overlaps >= TILE[axis] // 2).all()


def test_a_grid_of_the_tiles_size_is_decoded_whole() -> None:
    whole = np.ones((1, 4, 128, 192), np.float32)
    assert decode_tiled(lambda tokens: whole, pack(initial_noise(1, *TILE)), TILE, TILE) is whole


@pytest.mark.parametrize(
    ("grid", "largest", "expected"),
    [
        ((16, 16), (99, 99), (16, 16)),
        ((32, 32), (99, 99), (32, 32)),
        ((30, 30), (99, 99), (16, 24)),  # six tiles, none of which reaches beyond the picture
        ((10, 10), (99, 99), (16, 16)),  # none fits into it: the smallest that covers it
        ((48, 48), (99, 99), (32, 32)),
        ((48, 48), (31, 31), (16, 24)),
        ((32, 32), (16, 16), (16, 16)),
    ],
)
def test_the_tile_that_draws_it_best_is_chosen(grid: Grid, largest: Grid, expected: Grid) -> None:
    assert choose_tile([(16, 16), (16, 24), (32, 32)], grid, largest) == expected


def test_no_tile_small_enough_is_an_error_that_names_the_sizes() -> None:
    with pytest.raises(ContractError, match=r"as small as 128x64 pixels.*draw 256x256, 384x256\. Set the tile size"):
        choose_tile([(16, 16), (16, 24)], (32, 32), (4, 8))


def by_bytes(image: np.ndarray) -> np.ndarray:
    return np.clip(image * 0.5 + 0.5, 0, 1) * 255


@pytest.mark.slow
def test_a_picture_of_tiles_has_no_seams() -> None:
    """The model that ships: 512x512 with the decoder for 256x256: nine tiles, which end on all sides and in corners.

    Latents of noise have as much to get wrong everywhere, other than a picture of something.
    """
    model, grid = ModelSet(EMBEDDED_FOLDER), (32, 32)
    tokens = pack(initial_noise(1, *grid))
    whole, tiled = (
        by_bytes(next(iter(decode(model, tokens, *grid, largest_tile=largest)))) for largest in (None, (16, 16))
    )
    assert whole.shape == tiled.shape == (1, 4, 512, 512)
    borders = np.array([128, 192, 256, 320, 384])  # where tiles end, and where one gives way to the other
    at_border = (np.abs(np.arange(512) + 0.5 - borders[:, None]) < 8).any(axis=0)
    difference = np.abs(tiled - whole).mean(axis=(0, 1))
    inside = difference[~at_border][:, ~at_border].mean()
    assert 0 < inside < 0.5
    assert difference[at_border][:, at_border].mean() <= 1.5 * inside  # the corners, where four tiles meet
    for lines in (difference, difference.T):
        for border in borders:
            assert lines[border - 8 : border + 8].mean() <= 1.5 * inside
    for axis in (2, 3):
        step = np.abs(np.diff(tiled, axis=axis)).mean(axis=(0, 1, 5 - axis))
        assert step[borders - 1].max() <= 1.5 * np.delete(step, borders - 1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["a large red star sticker, transparent background", "a large glass blue ring on a pink background"]
)
def test_a_picture_of_something_is_no_worse_where_tiles_end(text: str) -> None:
    """There the difference from the whole picture depends on what is drawn, so the same pixels are compared.

    Tiles of 256x256 give way to each other in the middle of 384x256; cut out around it, a tile has it in its middle.
    """
    model, grid, tile = ModelSet(EMBEDDED_FOLDER), (16, 24), (16, 16)
    settings = Settings(10, sampler="adams_bashforth_2m")
    sampling = Sampling(model, encode_prompt(model, text), initial_noise(1, *grid), settings, keep_loaded="all")
    list(sampling.run())
    latents = unpack(sampling.tokens, *grid)
    whole, tiled = (
        by_bytes(next(iter(decode(model, sampling.tokens, *grid, largest_tile=largest)))) for largest in (None, tile)
    )
    inside = by_bytes(next(iter(decode(model, pack(latents[..., 4:20]), *tile))))
    start, end = 160, 224  # where one tile gives way to the other
    at_border = np.abs(tiled - whole)[..., start:end].mean()
    in_a_tile = np.abs(inside[..., start - 64 : end - 64] - whole[..., start:end]).mean()
    assert 0 < at_border <= 1.5 * in_a_tile
