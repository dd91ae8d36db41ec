"""The VAE encoder against diffusers' ``AutoencoderKLQwenImage21`` on random weights, in fp32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21
from torch import nn

from coreai_rgba_image.host.graphs.vae_decoder import VAEDecoderConfig
from coreai_rgba_image.host.graphs.vae_encoder import VAEEncoder

CONFIGS = [
    {"base_dim": 4, "decoder_base_dim": 4},
    {"base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 1, 2, 4, 4], "num_res_blocks": 1},
    {
        "base_dim": 4,
        "decoder_base_dim": 4,
        "dim_mult": [1, 2, 4, 4, 4],
        "temperal_downsample": [True, False, False, True],
    },
]


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS)
def test_latents_are_the_references_mean_in_model_space(
    randomize: Callable[[nn.Module], nn.Module], config: dict[str, Any]
) -> None:
    reference = AutoencoderKLQwenImage21(**config)
    randomize(reference)
    ours = VAEEncoder(VAEDecoderConfig.from_json(dict(reference.config))).eval()
    weights = {
        name: value
        for name, value in reference.state_dict().items()
        if name.startswith(("encoder.", "quant_conv.")) and ".time_conv." not in name
    }
    ours.load_state_dict(weights, strict=True)
    image = torch.rand((1, 4, 80, 48), generator=torch.Generator().manual_seed(1)) * 2 - 1

    expected = reference.encode(image[:, :, None]).latent_dist.mean[:, :, 0]
    found = ours(image)

    assert found.shape == (1, 15, 64)
    std, mean = (torch.tensor(values) for values in (reference.config.latents_std, reference.config.latents_mean))
    found = (found * std + mean).transpose(1, 2).reshape(expected.shape)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
