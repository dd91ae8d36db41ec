"""The encoder half of Qwen-Image-2.1's VAE, for one frame, in plain torch: what real pictures look like as latents.

No bundle holds it. The exporter fits previews with it, as latents drawn at random decode to nothing
like a picture. Parameter names are those of the checkpoint's ``vae/``. Source: diffusers'
``AutoencoderKLQwenImage21``, whose ``encode`` gives the distribution that this is the mean of.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vae_decoder import ChannelNorm, MidBlock, ResidualBlock, VAEDecoderConfig


class Downsampler(nn.Module):
    """Half the size by a strided convolution (``resample.1`` in the checkpoint)."""

    def __init__(self, channels: int):
        super().__init__()
        self.resample = nn.ModuleList([nn.Identity(), nn.Conv2d(channels, channels, 3, stride=2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resample[1](F.pad(x, (0, 1, 0, 1)))


class DownBlock(nn.Module):
    """Residual blocks, and around them the mean of what each output channel's share of the input holds."""

    def __init__(self, in_channels: int, out_channels: int, resnets: int, downsample: bool, temporal: bool):
        super().__init__()
        widths = [in_channels, *[out_channels] * resnets]
        self.resnets = nn.ModuleList(ResidualBlock(a, b) for a, b in pairwise(widths))
        self.downsampler = Downsampler(out_channels) if downsample else None
        self.out_channels = out_channels
        self.frames_before = int(downsample and temporal)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for resnet in self.resnets:
            hidden = resnet(hidden)
        if self.downsampler is None:
            return hidden + self._averaged(x, 1)
        return self.downsampler(hidden) + self._averaged(x, 2)

    def _averaged(self, x: Tensor, factor: int) -> Tensor:
        """In time a still picture is preceded by an empty frame, which counts in the mean."""
        parts = F.pixel_unshuffle(x, factor).unflatten(1, (x.shape[1], 1, factor**2))  # BCHW -> BC1phw
        parts = F.pad(parts, (0, 0, 0, 0, 0, 0, self.frames_before, 0))
        return parts.flatten(1, 3).unflatten(1, (self.out_channels, -1)).mean(2)


class Encoder(nn.Module):
    def __init__(self, config: VAEDecoderConfig):
        super().__init__()
        widths = [config.base_dim * multiple for multiple in (1, *config.dim_mult)]
        temporal = (*config.temperal_downsample, False)
        self.conv_in = nn.Conv2d(config.out_channels, widths[0], 3, padding=1)
        self.down_blocks = nn.ModuleList(
            DownBlock(a, b, config.num_res_blocks, index < len(config.dim_mult) - 1, temporal[index])
            for index, (a, b) in enumerate(pairwise(widths))
        )
        self.mid_block = MidBlock(widths[-1])
        self.norm_out = ChannelNorm(widths[-1], 3)
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.z_dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(self.mid_block(x))))


class VAEEncoder(nn.Module):
    """An image ``[1, 4, 16 h, 16 w]`` in [-1, 1] to packed model-space latents ``[1, N, 64]``."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: VAEDecoderConfig):
        super().__init__()
        self.encoder = Encoder(config)
        self.quant_conv = nn.Conv2d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.register_buffer("mean", torch.tensor(config.latents_mean), persistent=False)
        self.register_buffer("std", torch.tensor(config.latents_std), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        means, _ = self.quant_conv(self.encoder(image)).chunk(2, dim=1)  # the rest are log variances
        return (means.flatten(2).transpose(1, 2) - self.mean) / self.std  # BChw -> BNC
