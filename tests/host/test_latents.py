"""Noise, packing and the two latent spaces."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.latents import (
    QWEN_IMAGE_21,
    LatentStatistics,
    from_vae_space,
    initial_noise,
    pack,
    to_vae_space,
    unpack,
)

HIGHEST_SEED = 2**64 - 1
FINITE = st.floats(-100, 100, width=32, allow_subnormal=False)


def latents(batch: int = 2, height: int = 3, width: int = 5) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, 64, height, width), dtype=np.float32)


@st.composite
def grids_of_latents(draw: st.DrawFn) -> np.ndarray:
    shape = (draw(st.integers(1, 2)), 64, draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    return draw(hnp.arrays(np.float32, shape, elements=FINITE))


def comfyui_noise(shape: tuple[int, ...], seed: int, indices: list[int] | None) -> np.ndarray:
    """What ``prepare_noise`` of ComfyUI's comfy/sample.py draws: one of a series of single draws for each index."""
    generator = torch.manual_seed(seed)
    if indices is None:
        return torch.randn(shape, generator=generator).numpy()
    series = [torch.randn((1, *shape[1:]), generator=generator) for _ in range(max(indices) + 1)]
    return torch.cat([series[index] for index in indices]).numpy()


@pytest.mark.parametrize("seed", [0, 1, 42, 1234, 2**32, 2**63, HIGHEST_SEED])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (16, 16), (9, 11), (12, 8)])
def test_one_pictures_noise_is_the_references_draw(seed: int, height: int, width: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn((1, 1, 64, height, width), generator=generator)[0].numpy()
    noise = initial_noise(seed, height, width)
    assert noise.dtype == np.float32
    assert np.array_equal(noise, drawn)


@pytest.mark.parametrize("seed", [0, 7, HIGHEST_SEED])
@pytest.mark.parametrize("indices", [None, [0, 1, 2], [5, 0, 5], [2, 2, 2], [9, 3, 4]])
def test_a_batchs_noise_is_comfyuis(seed: int, indices: list[int] | None) -> None:
    noise = initial_noise(seed, 9, 8, batch_size=3, batch_index=indices)
    assert np.array_equal(noise, comfyui_noise((3, 64, 9, 8), seed, indices))


@given(st.integers(0, HIGHEST_SEED), st.lists(st.integers(0, 5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_any_batch_index_is_comfyuis(seed: int, indices: list[int]) -> None:
    noise = initial_noise(seed, 4, 4, len(indices), indices)
    assert np.array_equal(noise, comfyui_noise((len(indices), 64, 4, 4), seed, indices))


def test_drawing_leaves_torchs_own_generator_alone() -> None:
    state = torch.get_rng_state()
    initial_noise(3, 8, 8)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ContractError, match=f"the seed is {seed}: it must be from 0 to 18446744073709551615"):
        initial_noise(seed, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 8), "0 x 8 grid"),
        ((0, 8, -2), "8 x -2 grid"),
        ((0, 8, 8, 0), "batch has 0 latents"),
        ((0, 8, 8, 2, [0]), "batch_index"),
        ((0, 8, 8, 2, [0, -1]), "batch_index"),
    ],
)
def test_noise_for_nothing_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        initial_noise(*arguments)


@given(grids_of_latents())
def test_packing_and_unpacking_are_inverse(z: np.ndarray) -> None:
    height, width = z.shape[2:]
    tokens = pack(z)
    assert tokens.shape == (len(z), height * width, 64)
    assert np.array_equal(unpack(tokens, height, width), z)
    assert np.array_equal(pack(unpack(tokens, height, width)), tokens)


def test_token_y_times_w_plus_x_holds_the_channels_of_pixel_y_x() -> None:
    z = latents(height=3, width=5)
    tokens = pack(z)
    assert np.array_equal(tokens[1, 2 * 5 + 3], z[1, :, 2, 3])
    assert np.array_equal(tokens, torch.from_numpy(z).view(2, 64, 15).transpose(1, 2).numpy())
    assert tokens.flags.c_contiguous
    assert unpack(tokens, 3, 5).flags.c_contiguous


@pytest.mark.parametrize("shape", [(64, 3, 5), (1, 16, 3, 5), (1, 64, 1, 3, 5), (1, 4, 3, 5)])
def test_packing_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match=r"pass \[B, 64, h, w\]"):
        pack(np.zeros(shape, dtype=np.float32))


@pytest.mark.parametrize("shape", [(15, 64), (1, 14, 64), (1, 15, 63), (1, 64, 3, 5)])
def test_unpacking_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match=r"a 3 x 5 grid needs \[B, 15, 64\]"):
        unpack(np.zeros(shape, dtype=np.float32), 3, 5)


def test_the_statistics_are_those_the_reference_publishes(tiny_checkpoint: Path) -> None:
    from diffusers import AutoencoderKLQwenImage21

    published = AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4).config
    assert list(QWEN_IMAGE_21.mean) == list(published.latents_mean)
    assert list(QWEN_IMAGE_21.std) == list(published.latents_std)
    config = json.loads((tiny_checkpoint / "vae" / "config.json").read_text(encoding="utf-8"))
    assert (config["latents_mean"], config["latents_std"]) == (list(QWEN_IMAGE_21.mean), list(QWEN_IMAGE_21.std))


def test_vae_space_is_model_space_times_std_plus_mean_per_channel() -> None:
    z = latents()
    mean, std = (torch.tensor(values).view(1, 64, 1, 1) for values in (QWEN_IMAGE_21.mean, QWEN_IMAGE_21.std))
    converted = to_vae_space(z)
    assert converted.dtype == np.float32
    assert np.array_equal(converted, (torch.from_numpy(z) * std + mean).numpy())
    assert np.array_equal(from_vae_space(z), ((torch.from_numpy(z) - mean) / std).numpy())


@given(grids_of_latents())
def test_the_spaces_are_inverse_within_rounding(z: np.ndarray) -> None:
    assert np.allclose(from_vae_space(to_vae_space(z)), z, rtol=1e-6, atol=1e-5)
    assert np.allclose(to_vae_space(from_vae_space(z)), z, rtol=1e-6, atol=1e-5)


@given(grids_of_latents())
def test_tokens_and_latents_convert_alike(z: np.ndarray) -> None:
    assert np.array_equal(to_vae_space(pack(z)), pack(to_vae_space(z)))
    assert np.array_equal(from_vae_space(pack(z)), pack(from_vae_space(z)))


def test_a_model_sets_own_statistics_are_used() -> None:
    own = LatentStatistics(mean=tuple([1.0] * 64), std=tuple([2.0] * 64))
    assert np.array_equal(to_vae_space(latents(), own), latents() * 2 + 1)
    assert np.array_equal(from_vae_space(latents() * 2, own), (latents() * 2 - 1) / 2)


@pytest.mark.parametrize("shape", [(1, 16, 3, 5), (15, 64), (1, 15, 16), (1, 64, 1, 3, 5)])
def test_converting_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    for convert in (to_vae_space, from_vae_space):
        with pytest.raises(ContractError, match=r"pass tokens \[B, N, 64\] or latents"):
            convert(np.zeros(shape, dtype=np.float32))


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0] * 63, [1.0] * 64, "mean has 63 values"),
        ([0.0] * 64, [1.0] * 65, "std has 65 values"),
        ([0.0] * 64, [1.0] * 63 + [0.0], "not above 0"),
        ([0.0] * 64, [1.0] * 63 + [float("nan")], "not above 0"),
    ],
)
def test_impossible_statistics_are_refused(mean: list[float], std: list[float], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        LatentStatistics(tuple(mean), tuple(std))
