"""The VAE decoder against diffusers' ``AutoencoderKLQwenImage21`` on random weights, in fp32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor, nn

from coreai_rgba_image.host.graphs.vae_decoder import VAEDecoder, VAEDecoderConfig
from coreai_rgba_image.host.latents import to_vae_space

CONFIGS = [
    {"base_dim": 4, "decoder_base_dim": 8},
    {"base_dim": 4, "decoder_base_dim": 8, "dim_mult": [1, 1, 2, 4, 4], "num_res_blocks": 1},
    {
        "base_dim": 4,
        "decoder_base_dim": 4,
        "dim_mult": [1, 2, 4, 4, 4],
        "temperal_downsample": [True, False, False, True],
    },
]
GRIDS = [(8, 8), (5, 9), (1, 7)]
UNUSED = ("encoder.", "quant_conv.")


class Case(NamedTuple):
    ours: VAEDecoder
    tokens: Tensor
    reference: AutoencoderKLQwenImage21
    latents: Tensor

    @torch.no_grad()
    def unclamped(self) -> Tensor:
        """The reference's picture before its public ``decode`` clamps it."""
        return self.reference.decoder(self.reference.post_quant_conv(self.latents), first_chunk=True)[:, :, 0]


def make_case(randomize: Callable[[nn.Module], nn.Module], config: dict[str, Any], grid: tuple[int, int]) -> Case:
    reference = AutoencoderKLQwenImage21(**config)
    randomize(reference)
    ours = VAEDecoder(VAEDecoderConfig.from_json(dict(reference.config)), *grid).eval()
    weights = {name: value for name, value in reference.state_dict().items() if not name.startswith(UNUSED)}
    ours.load_state_dict({name: value for name, value in weights.items() if ".time_conv." not in name}, strict=True)
    tokens = torch.randn((1, grid[0] * grid[1], 64), generator=torch.Generator().manual_seed(1))
    mean, std = (
        torch.tensor(values).view(1, 64, 1, 1, 1)
        for values in (reference.config.latents_mean, reference.config.latents_std)
    )
    latents = tokens.transpose(1, 2).reshape(1, 64, 1, *grid) * std + mean
    return Case(ours, tokens, reference, latents)


def difference(image: Tensor, reference: Tensor) -> float:
    return ((image - reference).abs().max() / reference.abs().max()).item()


@torch.no_grad()
def run(case: Case, tokens: Tensor | None = None) -> Tensor:
    return case.ours(case.tokens if tokens is None else tokens)


@pytest.fixture(scope="module")
def case(randomize: Callable[[nn.Module], nn.Module]) -> Case:
    return make_case(randomize, CONFIGS[1], (6, 4))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("config", CONFIGS)
def test_pictures_equal_the_references(
    randomize: Callable[[nn.Module], nn.Module], config: dict[str, Any], grid: tuple[int, int]
) -> None:
    case = make_case(randomize, config, grid)
    image = run(case)
    assert image.shape == (1, 4, grid[0] * 16, grid[1] * 16)
    assert case.unclamped().std() > 0.1
    assert difference(image, case.unclamped()) <= 1e-5


def test_clamped_pictures_equal_those_of_the_references_decode(case: Case) -> None:
    with torch.no_grad():
        decoded = case.reference.decode(case.latents, return_dict=False)[0][:, :, 0]
    assert (decoded.abs() < 1).float().mean() > 0.3
    assert (run(case).clamp(-1, 1) - decoded).abs().max() <= 1e-5


def test_latents_un_normalised_twice_miss_the_bar(case: Case) -> None:
    again = torch.from_numpy(to_vae_space(case.tokens.numpy()))
    assert difference(run(case, again), case.unclamped()) > 1e-5


def test_latents_not_un_normalised_miss_the_bar(case: Case) -> None:
    plain = replace(case.ours.config, latents_mean=(0.0,) * 64, latents_std=(1.0,) * 64)
    ours = VAEDecoder(plain, 6, 4).eval()
    ours.load_state_dict(case.ours.state_dict())
    assert difference(run(case._replace(ours=ours)), case.unclamped()) > 1e-5


def test_tokens_in_column_order_miss_the_bar(case: Case) -> None:
    columns = torch.from_numpy(np.arange(24).reshape(6, 4).T.flatten())
    assert difference(run(case, case.tokens[:, columns]), case.unclamped()) > 1e-5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_residual": False}, "is_residual is False"),
        ({"patch_size": 2}, "patch_size is 2"),
        ({"latents_mean": [0.0] * 16}, "latents_mean has 16 values for 64"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(changed: dict[str, Any], message: str) -> None:
    config = dict(AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4).config)
    with pytest.raises(ValueError, match=message):
        VAEDecoderConfig.from_json({**config, **changed})
