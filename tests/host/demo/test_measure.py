"""The measure passes ideal pictures and fails each thing that can be wrong with one."""

import random

import numpy as np
import pytest

from coreai_rgba_image.host.demo.captions import SHAPES, Scene, all_scenes
from coreai_rgba_image.host.demo.measure import judge, score
from coreai_rgba_image.host.demo.pictures import draw, random_placement


def drawn(scene: Scene, height: int = 128, width: int = 128, seed: int = 0) -> np.ndarray:
    return draw(scene, random_placement(scene, random.Random(seed)), height, width)


@pytest.mark.parametrize(("height", "width"), [(128, 128), (128, 192), (256, 256)])
def test_ideal_pictures_are_right(height: int, width: int) -> None:
    for scene in random.Random(height + width).sample(all_scenes(), 24):
        verdict = judge(drawn(scene, height, width), scene.caption)
        assert verdict.right, (scene.caption, verdict)
        assert verdict.overlap > 0.9


STAR = Scene("large", False, "red", "star")
GLASS = Scene("large", True, "red", "star")
ON_BLUE = Scene("large", False, "red", "star", "blue")


@pytest.mark.parametrize(
    ("asked", "shown", "wrong"),
    [
        (STAR, Scene("large", False, "orange", "star"), {"colour"}),
        (STAR, Scene("small", False, "red", "star"), {"size"}),
        (STAR, GLASS, {"glass"}),
        (GLASS, STAR, {"glass"}),
        (ON_BLUE, Scene("large", False, "red", "star", "black"), {"colour"}),
        (ON_BLUE, Scene("large", False, "red", "heart", "blue"), {"shape"}),
        (ON_BLUE, Scene("large", True, "red", "star", "blue"), {"colour"}),
    ],
)
def test_one_wrong_property_is_found(asked: Scene, shown: Scene, wrong: set[str]) -> None:
    verdict = judge(drawn(shown), asked)
    assert {name for name in ("colour", "shape", "corners", "size", "glass") if not getattr(verdict, name)} == wrong


def test_no_shape_passes_for_another() -> None:
    for shown in SHAPES:
        picture = drawn(Scene("large", False, "green", shown))
        passed = [asked for asked in SHAPES if judge(picture, Scene("large", False, "green", asked)).shape]
        assert passed == [shown]


def test_a_transposed_picture_is_wrong_unless_the_shape_is_symmetric() -> None:
    scenes = [Scene("large", False, "green", shape) for shape in SHAPES]
    passed = [scene.shape for scene in scenes if judge(drawn(scene).swapaxes(0, 1), scene).shape]
    assert passed == ["circle", "square", "ring"]


def test_inverted_alpha_and_a_missing_background_are_wrong() -> None:
    inverted = drawn(STAR)
    inverted[..., 3] = 255 - inverted[..., 3]
    assert not judge(inverted, STAR).corners
    assert not judge(drawn(STAR), ON_BLUE).corners
    assert not judge(drawn(ON_BLUE), STAR).corners


@pytest.mark.parametrize("value", [0, 128, 255])
def test_an_empty_picture_is_wrong(value: int) -> None:
    flat = np.full((128, 128, 4), value, dtype=np.uint8)
    assert not judge(flat, STAR).right
    assert not judge(flat, ON_BLUE).right


def test_noise_is_wrong() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 4), dtype=np.uint8)
    assert not any(judge(noise, scene).right for scene in random.Random(0).sample(all_scenes(), 16))


def test_the_picture_must_be_rgba8() -> None:
    with pytest.raises(ValueError, match="pass uint8"):
        judge(np.zeros((8, 8, 3), dtype=np.uint8), STAR)


def test_scores_count_each_property_among_those_who_asked() -> None:
    pairs = [
        (STAR, judge(drawn(STAR), STAR)),
        (GLASS, judge(drawn(STAR), GLASS)),
        (ON_BLUE, judge(drawn(STAR), ON_BLUE)),
    ]
    scores = score(pairs)
    assert scores.pictures == 3
    assert scores.transparent == 1.0
    assert scores.opaque == 0.0
    assert scores.glass == 0.0
    assert scores.all_right == pytest.approx(1 / 3)
