"""One velocity at a time for a sampler of somebody else's, compared with our own."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from coreai_rgba_image.host import residency
from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.latents import initial_noise, pack, unpack
from coreai_rgba_image.host.model_set import ModelSet
from coreai_rgba_image.host.pipeline import encode_prompts
from coreai_rgba_image.host.sampling import Sampling, Settings
from coreai_rgba_image.host.velocity import VelocityRun

GRID = (8, 12)


@pytest.fixture(scope="module")
def model(tiny_set: Path) -> ModelSet:
    return ModelSet(tiny_set)


@pytest.fixture(scope="module")
def texts(model: ModelSet) -> list[np.ndarray]:
    return encode_prompts(model, ["a star", "a heart and several more words"])


@pytest.fixture(autouse=True)
def _nothing_loaded() -> None:
    residency.release_all()


def test_eulers_steps_with_it_are_our_samplers(model: ModelSet, texts: list[np.ndarray]) -> None:
    """Two prompts in turn, as guidance asks for them, to the last bit."""
    x = noise = initial_noise(7, *GRID)
    settings = Settings(3, cfg=2.0)
    sampling = Sampling(model, texts[0], noise, settings, negative=texts[1])
    list(sampling.run())
    sigmas = sampling.schedule.sigmas
    with VelocityRun(model) as velocity:
        for sigma, next_sigma in pairwise(sigmas):
            positive, negative = (velocity(x, float(sigma), text) for text in texts)
            x = x + (next_sigma - sigma) * (negative + np.float32(2) * (positive - negative))
        assert len(velocity._slots) == 2
    np.testing.assert_array_equal(x, unpack(sampling.tokens, *GRID))


def test_parts_of_other_sizes_have_positions_of_their_own(model: ModelSet, texts: list[np.ndarray]) -> None:
    latents = initial_noise(7, 16, 16)
    part = np.ascontiguousarray(latents[:, :, 4:12, 2:14])
    with VelocityRun(model) as velocity:
        velocity(latents, 0.5, texts[0])
        of_part = velocity(part, 0.5, texts[0])
    with VelocityRun(model) as velocity:
        np.testing.assert_array_equal(of_part, velocity(part, 0.5, texts[0]))
    assert pack(of_part).shape == (1, 96, 64)


def test_the_bundle_is_loaded_from_the_first_velocity_to_the_end(model: ModelSet, texts: list[np.ndarray]) -> None:
    with VelocityRun(model) as velocity:
        assert residency.loaded() == []
        velocity(initial_noise(7, *GRID), 1.0, texts[0])
        assert [resident.bundle for resident in residency.loaded()] == [model.dit]
    assert residency.loaded() == []


def test_it_is_released_after_an_error_too(model: ModelSet, texts: list[np.ndarray]) -> None:
    noise = initial_noise(7, *GRID)
    with pytest.raises(ContractError, match="not finite"), VelocityRun(model) as velocity:
        velocity(velocity(noise, 1.0, texts[0]) * np.float32(np.nan), 1.0, texts[0])
    assert residency.loaded() == []


def test_it_is_kept_if_told_so(model: ModelSet, texts: list[np.ndarray]) -> None:
    with VelocityRun(model, "all") as velocity:
        velocity(initial_noise(7, *GRID), 1.0, texts[0])
    assert [resident.bundle for resident in residency.loaded()] == [model.dit]
    residency.release_all()


@pytest.mark.parametrize(
    ("latents", "embeddings", "message"),
    [
        (initial_noise(7, 2, 2), np.zeros((1, 9, 256), np.float32), "4 image tokens"),
        (initial_noise(7, *GRID), np.zeros((1, 77, 768), np.float32), r"\[1, 77, 768\].*CLIP of Core AI Model"),
        (initial_noise(7, *GRID) * np.float32(np.nan), None, "sampler's own latents are not finite at noise level 0.5"),
    ],
)
def test_what_the_dit_does_not_take_is_refused_before_it_is_loaded(
    model: ModelSet, texts: list[np.ndarray], latents: np.ndarray, embeddings: np.ndarray | None, message: str
) -> None:
    with VelocityRun(model) as velocity:
        with pytest.raises(ContractError, match=message):
            velocity(latents, 0.5, texts[0] if embeddings is None else embeddings)
        assert residency.loaded() == []
