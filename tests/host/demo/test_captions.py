"""The grammar: every scene has one caption, every caption one scene, and paraphrases keep the meaning."""

import random

import pytest

from coreai_rgba_image.host.demo.captions import (
    COLOURS,
    SHAPES,
    Scene,
    all_scenes,
    paraphrase,
    parse_caption,
    random_scene,
)


def test_captions_read_as_the_grammar_says() -> None:
    assert Scene("large", False, "red", "star").caption == "a large red star sticker, transparent background"
    assert Scene("small", True, "blue", "ring", "pink").caption == "a small glass blue ring on a pink background"


def test_every_caption_parses_back_to_its_scene() -> None:
    scenes = all_scenes()
    assert len(scenes) == 2048
    assert len({scene.caption for scene in scenes}) == 2048
    assert [parse_caption(scene.caption) for scene in scenes] == scenes


@pytest.mark.parametrize(
    "text", ["", "a red star", "a large red star", "a large mauve star sticker, transparent background"]
)
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="an example is"):
        parse_caption(text)


def test_a_shape_cannot_have_the_colour_of_its_background() -> None:
    with pytest.raises(ValueError, match="cannot be seen"):
        Scene("large", False, "red", "star", "red")


def test_two_colours_never_fit_one_tolerance() -> None:
    values = list(COLOURS.values())
    for index, one in enumerate(values):
        for other in values[index + 1 :]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 80


def test_a_tenth_of_the_scenes_is_held_out() -> None:
    share = sum(scene.held_out for scene in all_scenes()) / 2048
    assert 0.08 < share < 0.12
    rng = random.Random(0)
    assert all(random_scene(rng, held_out=True).held_out for _ in range(20))
    assert not any(random_scene(rng, held_out=False).held_out for _ in range(20))


def test_paraphrases_name_the_colour_and_the_shape_once() -> None:
    rng = random.Random(0)
    scene = Scene("small", True, "green", "heart", "yellow")
    wordings = {paraphrase(scene, rng) for _ in range(200)}
    assert len(wordings) > 100
    for wording in wordings:
        words = wording.lower()
        assert "  " not in words
        assert sum(words.count(colour) for colour in COLOURS) == 2
        assert words.index("yellow") > words.index("green")
        assert sum(words.count(shape) for shape in SHAPES) == 1
