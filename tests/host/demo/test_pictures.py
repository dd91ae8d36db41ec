"""The drawings: what is inside, outside and at the edge, at any size."""

import numpy as np
import pytest

from coreai_rgba_image.host.demo.captions import COLOURS, SHAPES, Scene
from coreai_rgba_image.host.demo.pictures import Placement, draw, ideal_mask, unit_area

CENTRED = Placement(radius=0.38)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mask_has_the_same_area_at_every_size(shape: str) -> None:
    for height, width in ((128, 128), (256, 384), (512, 512)):
        area = ideal_mask(shape, CENTRED, height, width).sum() / min(height, width) ** 2
        assert area == pytest.approx(unit_area(shape) * 0.38**2, rel=0.03)


def test_known_areas() -> None:
    assert unit_area("circle") == pytest.approx(np.pi * 0.92**2, rel=0.01)
    assert unit_area("square") == pytest.approx(1.64**2, rel=0.01)
    assert unit_area("ring") == pytest.approx(np.pi * (0.96**2 - 0.42**2), rel=0.01)


@pytest.mark.parametrize("shape", ["triangle", "star", "diamond", "cross", "heart"])
def test_rows_and_columns_cannot_be_exchanged(shape: str) -> None:
    mask = ideal_mask(shape, CENTRED, 128, 128)
    assert (mask & mask.T).sum() / (mask | mask.T).sum() < 0.75


def test_a_sticker_is_opaque_inside_and_clear_outside() -> None:
    made = draw(Scene("large", False, "red", "square"), CENTRED, 128, 128)
    assert made.dtype == np.uint8
    assert made[64, 64].tolist() == [*COLOURS["red"], 255]
    assert made[0, 0].tolist() == [255, 255, 255, 0]
    faint = made[..., 3] < 255
    assert (made[faint & (made[..., 3] > 0)][:, :3] == COLOURS["red"]).all(), "the edge has the sticker's colour"


def test_glass_lets_half_through() -> None:
    on_nothing = draw(Scene("large", True, "blue", "circle"), CENTRED, 128, 128)
    assert on_nothing[64, 64, 3] == 128
    assert len(np.unique(on_nothing[..., 3])) > 20, "its edge is soft"
    on_yellow = draw(Scene("large", True, "blue", "circle", "yellow"), CENTRED, 128, 128)
    assert (on_yellow[..., 3] == 255).all()
    halfway = (np.array(COLOURS["blue"]) + COLOURS["yellow"]) / 2
    assert np.abs(on_yellow[64, 64, :3] - halfway).max() <= 1
