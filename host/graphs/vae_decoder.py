"""The decoder half of Qwen-Image-2.1's VAE, for one frame, in plain torch.

The network is a causal video decoder; for a single frame every temporal convolution reads that
frame alone, so all of it is two-dimensional. Parameter names are those of the checkpoint's
``vae/``. Source: diffusers' ``AutoencoderKLQwenImage21``, whose public ``decode`` also clamps to
[-1, 1]; this graph does not.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VAEDecoderConfig:
    """The fields of ``vae/config.json`` that shape the decoder."""

    base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temperal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    decoder_base_dim: int | None = None
    out_channels: int = 4

    def __post_init__(self) -> None:
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(f"{name} has {len(getattr(self, name))} values for {self.z_dim} latent channels")

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "VAEDecoderConfig":
        for key, supported in (("is_residual", True), ("patch_size", None), ("attn_scales", [])):
            if config.get(key, supported) != supported:
                raise ValueError(f"vae config {key} is {config[key]!r}: this graph supports {supported!r} only")
        known: dict[str, Any] = {key: config[key] for key in config if key in cls.__dataclass_fields__}
        known.update({key: tuple(value) for key, value in known.items() if isinstance(value, list)})
        return cls(**known)


class ChannelNorm(nn.Module):
    """RMS norm over channels; the checkpoint keeps the scale as ``gamma`` with trailing axes of one."""

    def __init__(self, channels: int, trailing: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, *[1] * trailing))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.gamma.reshape(-1, 1, 1) * self.gamma.shape[0] ** 0.5
        return F.normalize(x, dim=1) * scale


class ResidualBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1 = ChannelNorm(in_channels, 3)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = ChannelNorm(out_channels, 3)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        same = in_channels == out_channels
        self.conv_shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(hidden))) + self.conv_shortcut(x)


class AttentionBlock(nn.Module):
    """Self-attention over pixels with a single head."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = ChannelNorm(channels, 2)
        self.to_qkv = nn.Conv2d(channels, channels * 3, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.to_qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value)
        return x + self.proj(attended.squeeze(1).transpose(1, 2).reshape(x.shape))


class MidBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.attentions = nn.ModuleList([AttentionBlock(channels)])
        self.resnets = nn.ModuleList([ResidualBlock(channels, channels), ResidualBlock(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Upsampler(nn.Module):
    """Twice the size by repetition, then a convolution (``resample.1`` in the checkpoint)."""

    def __init__(self, channels: int):
        super().__init__()
        self.resample = nn.ModuleList([nn.Identity(), nn.Conv2d(channels, channels, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        # Not F.interpolate, which says the same: it lowers to a gather whose index tables weigh megabytes in
        # each bundle and which doubles the time of a decode on the CPU runtime.
        return self.resample[1](x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))


class UpBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, resnets: int, upsample: bool, temporal: bool):
        super().__init__()
        widths = [in_channels, *[out_channels] * resnets]
        self.resnets = nn.ModuleList(ResidualBlock(a, b) for a, b in pairwise(widths))
        self.upsampler = Upsampler(out_channels) if upsample else None
        self.shortcut_channels = (
            shortcut_channels(in_channels, out_channels, 2 if temporal else 1) if upsample else None
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for resnet in self.resnets:
            hidden = resnet(hidden)
        if self.upsampler is None:
            return hidden
        return self.upsampler(hidden) + F.pixel_shuffle(x[:, self.shortcut_channels], 2)


def shortcut_channels(in_channels: int, out_channels: int, frames: int) -> list[int]:
    """Which input channel each of the ``out_channels * 4`` sub-pixels of the shortcut repeats.

    The reference repeats channels to ``out_channels * frames * 2 * 2`` and unfolds them into
    frames, rows and columns; of the first chunk only the last frame is kept.
    """
    repeats = out_channels * frames * 4 // in_channels
    return [
        ((channel * frames + frames - 1) * 4 + sub_pixel) // repeats
        for channel in range(out_channels)
        for sub_pixel in range(4)
    ]


class Decoder(nn.Module):
    def __init__(self, config: VAEDecoderConfig):
        super().__init__()
        base = config.decoder_base_dim or config.base_dim
        widths = [base * multiple for multiple in (config.dim_mult[-1], *reversed(config.dim_mult))]
        temporal = (*reversed(config.temperal_downsample), False)
        self.conv_in = nn.Conv2d(config.z_dim, widths[0], 3, padding=1)
        self.mid_block = MidBlock(widths[0])
        self.up_blocks = nn.ModuleList(
            UpBlock(
                a, b, config.num_res_blocks + 1, upsample=index < len(config.dim_mult) - 1, temporal=temporal[index]
            )
            for index, (a, b) in enumerate(pairwise(widths))
        )
        self.norm_out = ChannelNorm(widths[-1], 3)
        self.conv_out = nn.Conv2d(widths[-1], config.out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VAEDecoder(nn.Module):
    """Packed model-space latents ``[1, N, 64]`` to an image ``[1, 4, 16 h, 16 w]`` of one fixed size.

    The graph unpacks the tokens and applies ``latents * std + mean`` itself; the host must not.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: VAEDecoderConfig, height: int, width: int):
        super().__init__()
        self.config = config
        self.height, self.width = height, width
        self.post_quant_conv = nn.Conv2d(config.z_dim, config.z_dim, 1)
        self.decoder = Decoder(config)
        self.register_buffer("mean", torch.tensor(config.latents_mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.latents_std).view(1, -1, 1, 1), persistent=False)

    def forward(self, latents_packed: Tensor) -> Tensor:
        latents = latents_packed.transpose(1, 2).unflatten(2, (self.height, self.width))  # 1NC -> 1Chw
        return self.decoder(self.post_quant_conv(latents * self.std + self.mean))
