"""A preview is a linear map of the latents, laid on a checkerboard."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host.bundle import METADATA_KEY, import_coreai
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.model_set import EMBEDDED_FOLDER, ModelSet
from coreai_rgba_image.host.preview import BIAS, FACTORS, QWEN_IMAGE_21_PREVIEW, PreviewMap, preview_picture


def plain_map() -> PreviewMap:
    """Channel 0 is red, 1 green, 2 blue, 3 alpha."""
    return PreviewMap(np.eye(65, 4, dtype=np.float32))


def tokens_of(colours: list[list[float]]) -> np.ndarray:
    """Tokens whose first four channels are these."""
    tokens = np.zeros((1, len(colours), 64), dtype=np.float32)
    tokens[0, :, :4] = colours
    return tokens


def test_each_token_is_a_pixel_in_raster_order() -> None:
    tokens = tokens_of([[1, -1, -1, 1], [-1, 1, -1, 1], [-1, -1, 1, 0], [9, 9, 9, -9], [-1, -1, -1, 1], [0, 0, 0, 1]])
    expected = [
        [[255, 0, 0, 255], [0, 255, 0, 255], [0, 0, 255, 128]],
        [[255, 255, 255, 0], [0, 0, 0, 255], [128, 128, 128, 255]],
    ]
    np.testing.assert_array_equal(plain_map().rgba(tokens, 2, 3), expected)


def test_the_last_row_of_the_weights_is_added() -> None:
    weights = np.zeros((65, 4), dtype=np.float32)
    weights[-1] = [1, -1, 0, 1]
    assert PreviewMap(weights).rgba(np.ones((1, 1, 64), np.float32), 1, 1).tolist() == [[[255, 0, 128, 255]]]


def test_the_published_factors_are_opaque() -> None:
    tokens = np.random.default_rng(0).standard_normal((1, 6, 64), dtype=np.float32)
    rgba = QWEN_IMAGE_21_PREVIEW.rgba(tokens, 2, 3)
    expected = np.clip((tokens[0] @ FACTORS + BIAS) * 0.5 + 0.5, 0, 1).reshape(2, 3, 3) * 255
    assert np.abs(rgba[..., :3] - expected).max() <= 0.501
    assert (rgba[..., 3] == 255).all()


@pytest.mark.parametrize(
    ("height", "width", "longest", "size"),
    [(2, 3, 512, (48, 32)), (64, 64, 512, (512, 512)), (64, 16, 512, (128, 512)), (1, 256, 64, (64, 1))],
)
def test_a_preview_is_no_larger_than_asked_for_nor_than_its_picture(
    height: int, width: int, longest: int, size: tuple[int, int]
) -> None:
    tokens = np.zeros((1, height * width, 64), dtype=np.float32)
    assert preview_picture(tokens, height, width, plain_map(), longest).size == size


def test_where_nothing_is_the_checkerboard_shows_and_stays_sharp() -> None:
    nothing, red = [1, 1, 1, -1], [1, -1, -1, 1]
    picture = np.asarray(preview_picture(tokens_of([nothing] * 8 + [red] * 8), 4, 4, plain_map(), 512))
    assert np.unique(picture[:24]).tolist() == [153, 204]
    assert picture[0, [0, 15, 16, 31, 32], 0].tolist() == [204, 204, 153, 153, 204]
    assert (picture[40:] == [255, 0, 0]).all()


def test_colours_of_what_is_transparent_do_not_bleed() -> None:
    """Enlarging blends neighbours: white that nobody sees must not lighten the red beside it."""
    picture = np.asarray(preview_picture(tokens_of([[1, 1, 1, -1], [1, -1, -1, 1]]), 1, 2, plain_map(), 512))
    board = np.asarray(preview_picture(tokens_of([[0, 0, 0, -1]] * 2), 1, 2, plain_map(), 512))
    assert (picture[..., 1] <= board[..., 1]).all()


def test_tokens_of_another_grid_are_refused() -> None:
    with pytest.raises(ContractError, match=re.escape("[1, 6, 64], a 2 x 2 grid has 4")):
        plain_map().rgba(np.zeros((1, 6, 64), np.float32), 2, 2)


@pytest.mark.parametrize(
    "rows",
    [None, [], "abc", [[0.0] * 4] * 64, [[0.0] * 3] * 65, [[0.0] * 4] * 64 + [[0.0]], [[float("nan")] * 4] * 65, {}],
    ids=["null", "empty", "text", "no bias", "no alpha", "ragged", "NaN", "object"],
)
def test_metadata_that_is_no_map_is_refused(rows: object) -> None:
    with pytest.raises(ContractError, match="export it again"):
        PreviewMap.from_lists(rows)


def test_a_map_survives_the_metadata() -> None:
    weights = np.random.default_rng(0).standard_normal((65, 4), dtype=np.float32)
    again = PreviewMap.from_lists(PreviewMap(weights).to_lists())
    assert np.abs(again.weights - weights).max() <= 0.50001e-4


def test_the_model_that_ships_has_a_map_and_the_same_for_every_size() -> None:
    model = ModelSet(EMBEDDED_FOLDER)
    rows = [bundle.metadata["latents_to_rgba"] for bundle in model.vae_decoders.values()]
    assert rows == [model.preview_map.to_lists()] * 3


def set_with(metadata: dict[str, object], folder: Path) -> ModelSet:
    """One decoder of the model that ships, with this metadata in place of its own."""
    bundle = folder / "decoder.aimodel"
    shutil.copytree(ModelSet(EMBEDDED_FOLDER).vae_decoder(16, 16).path, bundle)
    text = json.dumps(metadata)
    import_coreai()[1].AIModelAsset.load(bundle).update_metadata(lambda own: own.set_custom(METADATA_KEY, text))
    return ModelSet(folder)


def test_a_set_without_a_map_takes_the_published_factors(tmp_path: Path) -> None:
    assert set_with({}, tmp_path).preview_map is QWEN_IMAGE_21_PREVIEW


def test_a_set_with_a_damaged_map_says_so(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="preview map of a VAE bundle"):
        _ = set_with({"latents_to_rgba": [[1, 2]]}, tmp_path).preview_map
