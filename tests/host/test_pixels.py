"""Float pictures to bytes, alpha to mask, pictures on a background."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.pixels import alpha_to_mask, composite, on_checkerboard, to_rgba8, to_unit

BYTES = np.arange(256, dtype=np.uint8)
RGBA8 = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=3, max_side=4).map(lambda shape: (*shape, 4)))


def truncated(unit: np.ndarray) -> np.ndarray:
    """To 8 bits as ComfyUI's SaveImage does it: ``np.clip(255.0 * image, 0, 255).astype(np.uint8)``."""
    return np.clip(255.0 * unit, 0, 255).astype(np.uint8)


@given(hnp.arrays(np.float32, (1, 4, 2, 3), elements=st.floats(-3, 3, width=32)))
def test_bytes_are_those_of_the_contract(image: np.ndarray) -> None:
    expected = np.round(np.clip(image * np.float32(0.5) + np.float32(0.5), 0, 1) * np.float32(255))
    rgba8 = to_rgba8(image)
    assert rgba8.dtype == np.uint8
    assert rgba8.shape == (1, 2, 3, 4)
    assert np.array_equal(rgba8, expected.transpose(0, 2, 3, 1))


@given(hnp.arrays(np.float32, (1, 4, 2, 3), elements=st.floats(-1, 1, width=32)))
def test_bytes_are_those_of_the_reference(image: np.ndarray) -> None:
    import torch
    from diffusers.image_processor import VaeImageProcessor

    [reference] = VaeImageProcessor(vae_scale_factor=16).postprocess(torch.from_numpy(image.copy()), output_type="pil")
    assert reference.mode == "RGBA"
    assert np.array_equal(to_rgba8(image)[0], np.asarray(reference))


def test_the_ends_and_infinities_are_clipped() -> None:
    values = np.array([-np.inf, -1.5, -1, 0, 1, 1.5, np.inf], dtype=np.float32)
    image = np.broadcast_to(values, (1, 4, 1, 7))
    assert to_rgba8(image)[0, 0, :, 0].tolist() == [0, 0, 0, 128, 255, 255, 255]


def test_every_byte_comes_back_from_its_own_value() -> None:
    image = np.broadcast_to(to_unit(BYTES) * 2 - 1, (1, 4, 1, 256))
    assert np.array_equal(to_rgba8(image)[0, 0, :, 2], BYTES)


def test_all_256_values_survive_a_truncation() -> None:
    assert to_unit(BYTES).dtype == np.float32
    assert np.array_equal(truncated(to_unit(BYTES)), BYTES)


def test_all_256_alphas_survive_the_way_through_a_mask() -> None:
    """JoinImageWithAlpha stores ``1 - mask``; SaveImage multiplies by 255 and truncates."""
    rgba8 = np.zeros((1, 1, 256, 4), dtype=np.uint8)
    rgba8[..., 3] = BYTES
    mask = alpha_to_mask(rgba8)
    assert mask.dtype == np.float32
    assert mask.shape == (1, 1, 256)
    assert np.array_equal(truncated(np.float32(1) - mask)[0, 0], BYTES)


def test_a_mask_is_one_minus_alpha() -> None:
    rgba8 = np.zeros((1, 1, 256, 4), dtype=np.uint8)
    rgba8[..., 3] = BYTES
    mask = alpha_to_mask(rgba8)[0, 0]
    assert np.abs(mask - (1 - BYTES / 255)).max() < 2e-7
    assert (mask[0], mask[255]) == (1, 0)
    assert ((mask >= 0) & (mask <= 1)).all()


@given(RGBA8, st.tuples(*[st.integers(0, 255)] * 3))
def test_compositing_is_alpha_over_the_colour(rgba8: np.ndarray, colour: tuple[int, int, int]) -> None:
    alpha = rgba8[..., 3:] / 255.0
    exact = rgba8[..., :3] * alpha + np.array(colour) * (1 - alpha)
    flat = composite(rgba8, colour)
    assert flat.dtype == np.uint8
    assert flat.shape == (*rgba8.shape[:3], 3)
    assert np.abs(flat - exact).max() <= 0.5001


@given(RGBA8)
def test_compositing_differs_from_pillows_by_one_level_at_most(rgba8: np.ndarray) -> None:
    white = Image.new("RGBA", (rgba8.shape[2], rgba8.shape[1]), "white")
    pillow = Image.alpha_composite(white, Image.fromarray(rgba8[0])).convert("RGB")
    assert np.abs(composite(rgba8)[0].astype(int) - np.asarray(pillow)).max() <= 1


@given(RGBA8, st.tuples(*[st.integers(0, 255)] * 3))
def test_opaque_hides_and_transparent_shows_the_colour(rgba8: np.ndarray, colour: tuple[int, int, int]) -> None:
    flat = composite(rgba8, colour)
    opaque, transparent = rgba8[..., 3] == 255, rgba8[..., 3] == 0
    assert np.array_equal(flat[opaque], rgba8[..., :3][opaque])
    assert (flat[transparent] == np.array(colour)).all()


def test_the_checkerboard_shows_through_where_transparent() -> None:
    rgba8 = np.zeros((1, 4, 4, 4), dtype=np.uint8)
    rgba8[0, 0, 0] = (10, 20, 30, 255)
    board = on_checkerboard(rgba8, square=2)
    assert board[0, 0, 0].tolist() == [10, 20, 30]
    assert board[0, :, :, 0].tolist() == [
        [10, 204, 153, 153],
        [204, 204, 153, 153],
        [153, 153, 204, 204],
        [153, 153, 204, 204],
    ]


@pytest.mark.parametrize("shape", [(4, 2, 2), (1, 3, 2, 2), (1, 2, 2, 4)])
def test_a_picture_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match=r"pass \[B, 4, H, W\]"):
        to_rgba8(np.zeros(shape, dtype=np.float32))


def test_nan_is_refused_with_its_number() -> None:
    image = np.zeros((1, 4, 2, 2), dtype=np.float32)
    image[0, 1, :, 0] = np.nan
    with pytest.raises(ContractError, match="2 NaN values"):
        to_rgba8(image)


def test_bytes_of_another_shape_or_dtype_are_refused() -> None:
    for wrong in (np.zeros((1, 2, 2, 3), np.uint8), np.zeros((2, 2, 4), np.uint8), np.zeros((1, 2, 2, 4), np.float32)):
        for function in (alpha_to_mask, composite, on_checkerboard):
            with pytest.raises(ContractError, match=r"pass uint8 \[B, H, W, 4\]"):
                function(wrong)


@pytest.mark.parametrize("colour", [(0, 0), (0, 0, 256), (-1, 0, 0), (0, 0, 0, 0)])
def test_an_impossible_colour_is_refused(colour: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match="three values from 0 to 255"):
        composite(np.zeros((1, 2, 2, 4), dtype=np.uint8), colour)
