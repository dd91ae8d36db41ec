"""The text stack of Qwen3-VL in plain torch, without its final norm.

Parameter names are those of ``text_encoder/`` below ``model.language_model.``. The output is the
residual stream after the last layer: that is what the DiT was trained on. With text alone the
three axes of Qwen3-VL's M-RoPE hold the same positions, so it collapses to ordinary RoPE.
Source: transformers' ``Qwen3VLTextModel`` for the behaviour, the host contract for the ends.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Linear, RMSNorm

MAX_LENGTH = 512
"""Positions the graph carries RoPE tables for: the upper end of the contract's ``Lfull`` axis."""


class Precision(NamedTuple):
    """What an encoder computes in; its weights are stored in bf16 whatever it is.

    ``residual`` is the dtype of the residual stream and of the norms that read it, ``branch`` that of
    what is added to the stream: attention and MLP, projections and positions included. Statistics of
    norms are fp32 in every case, as in transformers.
    """

    residual: torch.dtype
    branch: torch.dtype


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "r32": Precision(torch.float32, torch.bfloat16),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
}
"""The variants that the port notes of RGBA-Image-2.1 compare; fp32 there is called w16a32."""


@dataclass(frozen=True)
class TextEncoderConfig:
    """The fields of ``text_encoder/config.json``'s ``text_config`` that shape the network."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key/value heads"
            )

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "TextEncoderConfig":
        text = config.get("text_config", config)
        for key, supported in (("hidden_act", "silu"), ("attention_bias", False)):
            if text.get(key, supported) != supported:
                raise ValueError(f"text_config.{key} is {text[key]!r}: this graph supports {supported!r} only")
        # transformers 5 writes rope_parameters; version 4 wrote rope_theta beside rope_scaling.
        rope = text.get("rope_parameters") or {"rope_theta": text.get("rope_theta"), **(text.get("rope_scaling") or {})}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type is {rope['rope_type']!r}: this graph supports 'default' only")
        known = {key: value for key, value in text.items() if key in cls.__dataclass_fields__}
        return cls(**{**known, "rope_theta": float(rope["rope_theta"])})


def rope_table(config: TextEncoderConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. 511, ``[512, head_dim]``; both halves of a head share them."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.outer(torch.arange(MAX_LENGTH, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of ``x [1, heads, S, D]`` by ``cos, sin [S, D]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: TextEncoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_width)
        self.k_proj = Linear(config.hidden_size, key_width)
        self.v_proj = Linear(config.hidden_size, key_width)
        self.o_proj = Linear(query_width, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = rotate_halves(self.q_norm(query).transpose(1, 2), cos, sin)
        key = rotate_halves(self.k_norm(key).transpose(1, 2), cos, sin)
        key, value = (tensor.repeat_interleave(self.repeats, dim=1) for tensor in (key, value.transpose(1, 2)))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: TextEncoderConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: TextEncoderConfig, branch: torch.dtype):
        super().__init__()
        self.branch = branch
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # A branch in bf16 is widened to a residual stream in fp32 by the addition.
        x = x + self.self_attn(self.input_layernorm(x).to(self.branch), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x).to(self.branch))


class TextEncoder(nn.Module):
    """Token ids ``[1, Lfull]`` int32 to hidden states ``[1, Lfull, hidden_size]`` float32.

    Computing in fp32 is not a luxury: the ``<|im_start|>`` tokens grow to thousands in the middle
    layers and cancel at the end, which no partly-bf16 variant survived (port notes of
    RGBA-Image-2.1; ``host.gates.massive`` shows it in small).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TextEncoderConfig, precision: Precision = PRECISIONS["fp32"]):
        super().__init__()
        self.config = config
        self.precision = precision
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size), freeze=False
        )
        self.layers = nn.ModuleList(Layer(config, precision.branch) for _ in range(config.num_hidden_layers))
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids).to(self.precision.residual)
        cos, sin = (table[:length].to(self.precision.branch) for table in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x.float()
