"""The diffusion transformer of Qwen-Image-2.1 for text-to-image, in plain torch.

Parameter names are those of the checkpoint's ``transformer/``. The sequence is
``[text L | image N]``. Text tokens are modulated from t = 0 and attend causally to text alone;
image tokens are modulated from the sampled t and attend to everything. Attention is therefore
two calls without a mask input. Sources: diffusers' ``QwenImage21Transformer2DModel`` for the
behaviour, the host contract for the inputs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Linear, RMSNorm

TIMESTEP_CHANNELS = 256


@dataclass(frozen=True)
class DiTConfig:
    """The fields of ``transformer/config.json`` that shape the network."""

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    context_in_dim: int
    mlp_ratio: int = 3
    in_channels: int = 64
    out_channels: int = 64
    patch_size: int = 1
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    eps: float = 1e-6
    causal_condition: bool = True

    def __post_init__(self) -> None:
        if not self.causal_condition:
            raise ValueError("causal_condition is false: this graph modulates text from t = 0 and needs it true")
        if self.patch_size != 1:
            raise ValueError(f"patch_size is {self.patch_size}: this graph takes one token per latent pixel, 1")
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope {self.axes_dims_rope} add up to {sum(self.axes_dims_rope)}, "
                f"not to attention_head_dim {self.attention_head_dim}"
            )

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "DiTConfig":
        known = {key: value for key, value in config.items() if key in cls.__dataclass_fields__}
        known["axes_dims_rope"] = tuple(known.get("axes_dims_rope", cls.axes_dims_rope))
        return cls(**known)

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved channel pairs of ``x [1, S, heads, 2 P]`` by ``cos, sin [1, S, P]``, in fp32."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def timestep_embedding(timestep: Tensor) -> Tensor:
    """The sinusoid of 1000 t, cosines first, ``[rows, 256]``; fp32 whatever the weights are.

    Frequencies in bf16 put 1.39 rad of phase error on it (port notes of RGBA-Image-2.1).
    """
    half = TIMESTEP_CHANNELS // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(10000) / half))
    angles = (timestep.float() * 1000.0).unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear_1 = Linear(TIMESTEP_CHANNELS, width)
        self.linear_2 = Linear(width, width)

    def forward(self, embedding: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(embedding)))


class TextProjection(nn.Module):
    def __init__(self, context_width: int, width: int, eps: float):
        super().__init__()
        self.text_norm = RMSNorm(context_width, eps, offset=1.0)
        self.in_layer = Linear(context_width, width)
        self.out_layer = Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(features)), approximate="tanh"))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value ``[1, heads, S, head size]`` to what each query reads, of the same shape."""


class Attention(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.to_q = Linear(config.width, config.width)
        self.to_k = Linear(config.width, config.width)
        self.to_v = Linear(config.width, config.width)
        self.to_out = nn.ModuleList([Linear(config.width, config.width)])
        self.norm_q = RMSNorm(config.attention_head_dim, config.eps)
        self.norm_k = RMSNorm(config.attention_head_dim, config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.to_out[0](attend(*self.project(x, cos, sin)).transpose(1, 2).flatten(2))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, ``[1, heads, S, head size]`` each, positions applied."""
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.to_q, self.to_k, self.to_v))
        query = rotate_pairs(self.norm_q(query), cos, sin)
        key = rotate_pairs(self.norm_k(key), cos, sin)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def joint_attention(text_length: int) -> Attend:
    """For ``[text | image]`` in one sequence."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        text = text_attention(query[:, :, :text_length], key[:, :, :text_length], value[:, :, :text_length])
        image = F.scaled_dot_product_attention(query[:, :, text_length:], key, value)
        return torch.cat((text, image), dim=2)

    return attend


def text_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def image_attention(text_key: Tensor, text_value: Tensor) -> Attend:
    """For the image alone, whose queries see the text's keys and values first."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = torch.cat((text_key, key), dim=2), torch.cat((text_value, value), dim=2)
        return F.scaled_dot_product_attention(query, key, value)

    return attend


class FeedForward(nn.Module):
    """SwiGLU with the checkpoint's names: ``proj`` is the value, ``gate_layer`` the gate."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        hidden = config.width * config.mlp_ratio
        self.proj = Linear(config.width, hidden)
        self.gate_layer = Linear(config.width, hidden)
        self.out = Linear(hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate_layer(x)) * self.proj(x))


class Block(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.eps = config.eps
        self.attn = Attention(config)
        self.img_mlp = FeedForward(config)

    def forward(self, x: Tensor, modulation: list[Tensor], cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        scale_1, gate_1, scale_2, gate_2 = modulation
        x = x + gate_1 * self.attn(layer_norm(x, self.eps) * scale_1, cos, sin, attend)
        return x + gate_2 * self.img_mlp(layer_norm(x, self.eps) * scale_2)

    def project(self, x: Tensor, modulation: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value of its attention, for a caller that needs no more."""
        return self.attn.project(layer_norm(x, self.eps) * modulation[0], cos, sin)


def layer_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=eps)


class OutputNorm(nn.Module):
    """Layer norm scaled by the timestep embedding; this model adds no shift."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.eps = config.eps
        self.linear = Linear(config.width, config.width)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return layer_norm(x, self.eps) * (1 + self.linear(F.silu(embedding)))


class DiT(nn.Module):
    """Velocity of the image tokens. Shapes are the contract's; ``compute_dtype`` is that of the inside."""

    def __init__(self, config: DiTConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.time_text_embed = nn.ModuleDict({"timestep_embedder": TimestepEmbedder(config.width)})
        self.txt_in = TextProjection(config.context_in_dim, config.width, config.eps)
        self.img_in = Linear(config.in_channels, config.width)
        self.modulation = nn.Sequential(nn.SiLU(), Linear(config.width, 4 * config.width))
        self.transformer_blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm_out = OutputNorm(config)
        self.proj_out = Linear(config.width, config.out_channels)

    def forward(
        self,
        img_tokens: Tensor,
        txt_feats: Tensor,
        timestep: Tensor,
        txt_cos: Tensor,
        txt_sin: Tensor,
        img_cos: Tensor,
        img_sin: Tensor,
    ) -> Tensor:
        text, image = self.project_text(txt_feats), self.project_image(img_tokens)
        x = torch.cat((text, image), dim=1)
        cos, sin = torch.cat((txt_cos, img_cos), dim=1), torch.cat((txt_sin, img_sin), dim=1)

        embedding, embedding_0 = self.embed_timestep(timestep), self.embed_timestep(torch.zeros_like(timestep))
        modulation = [
            torch.cat((text_row.expand_as(text), image_row.expand_as(image)), dim=1)
            for text_row, image_row in zip(self.modulate(embedding_0), self.modulate(embedding), strict=True)
        ]
        attend = joint_attention(text.shape[1])
        for block in self.blocks:
            x = block(x, modulation, cos, sin, attend)
        return self.velocity(x[:, text.shape[1] :], embedding)

    @property
    def blocks(self) -> list[Block]:
        return [block for block in self.transformer_blocks if isinstance(block, Block)]

    def project_text(self, txt_feats: Tensor) -> Tensor:
        return self.txt_in(txt_feats.to(self.compute_dtype))

    def project_image(self, img_tokens: Tensor) -> Tensor:
        return self.img_in(img_tokens.to(self.compute_dtype))

    def embed_timestep(self, timestep: Tensor) -> Tensor:
        """``t [1]`` to its embedding, ``[1, width]``: image tokens read that of t, text tokens that of 0."""
        sinusoid = timestep_embedding(timestep).to(self.compute_dtype)
        return self.time_text_embed["timestep_embedder"](sinusoid)

    def modulate(self, embedding: Tensor) -> list[Tensor]:
        """Scale and gate of attention and feed-forward, ``[1, width]`` each, the same for every block."""
        scale_1, gate_1, scale_2, gate_2 = self.modulation(embedding).chunk(4, dim=-1)
        return [1 + scale_1, gate_1.tanh(), 1 + scale_2, gate_2.tanh()]

    def velocity(self, image: Tensor, embedding: Tensor) -> Tensor:
        """The last block's image tokens ``[1, N, width]`` to the velocity ``[1, N, 64]``, float32."""
        return self.proj_out(self.norm_out(image, embedding)).float()
