"""The demo model's text encoder and DiT as they are trained: the run-time graphs, in batches.

The graphs are written for one picture at a time. Their blocks do not care, so a batch needs only a
forward pass that spreads one timestep per picture. All captions of a batch have the same number of
tokens: the graphs know no padding, and neither does this.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..graphs.dit import DiT, DiTConfig, joint_attention
from ..graphs.text_encoder import TextEncoder, TextEncoderConfig
from ..rope import rope_tables

HEAD_SIZE = 128

DIT = DiTConfig(num_layers=4, num_attention_heads=2, attention_head_dim=HEAD_SIZE, context_in_dim=128, mlp_ratio=1)
"""The published DiT has 32 layers of 4096 channels; this one 4 of 256."""


def text_config(vocabulary: int) -> TextEncoderConfig:
    return TextEncoderConfig(
        vocab_size=vocabulary, hidden_size=DIT.context_in_dim, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, head_dim=HEAD_SIZE, rope_theta=5e6,
    )  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """RoPE tables of one text length and one grid, as tensors."""

    text_cos: Tensor
    text_sin: Tensor
    image_cos: Tensor
    image_sin: Tensor

    @classmethod
    def of(cls, text_length: int, height: int, width: int) -> "Rope":
        tables = rope_tables(text_length, height, width)
        return cls(*map(torch.from_numpy, (tables.txt_cos, tables.txt_sin, tables.img_cos, tables.img_sin)))


class DemoModel(nn.Module):
    """Text encoder and DiT, trained together."""

    def __init__(self, vocabulary: int, seed: int):
        super().__init__()
        self.text_encoder = TextEncoder(text_config(vocabulary))
        self.dit = DiT(DIT)
        initialize(self, torch.Generator().manual_seed(seed))

    def text_features(self, ids: Tensor, drop_idx: int) -> Tensor:
        """Token ids ``[B, Lfull]`` to the rows the DiT reads, ``[B, L, D]``."""
        return self.text_encoder(ids)[:, drop_idx:]

    def velocity(self, x: Tensor, text: Tensor, timestep: Tensor, rope: Rope) -> Tensor:
        """``DiT.forward`` for tokens ``[B, N, 64]``, text ``[B, L, D]`` and one timestep each, ``[B]``."""
        dit, batch, length = self.dit, x.shape[0], text.shape[1]
        text, image = dit.txt_in(text), dit.img_in(x)
        embedding = dit.embed_timestep(torch.cat((timestep, timestep.new_zeros(1)))).unsqueeze(1)
        modulation = [  # the last row is that of t = 0
            torch.cat((row[batch:].expand_as(text), row[:batch].expand_as(image)), dim=1)
            for row in dit.modulate(embedding)
        ]
        cos, sin = torch.cat((rope.text_cos, rope.image_cos), 1), torch.cat((rope.text_sin, rope.image_sin), 1)
        hidden, attend = torch.cat((text, image), dim=1), joint_attention(length)
        for block in dit.transformer_blocks:
            hidden = block(hidden, modulation, cos, sin, attend)
        return dit.velocity(hidden[:, length:], embedding[:batch])


def initialize(model: DemoModel, generator: torch.Generator) -> None:
    """Scale-preserving weights; gates near zero and an output of zero, so that training starts from the identity."""
    zero_centred = model.dit.txt_in.text_norm.weight
    branch_ends = ("to_out.0", "img_mlp.out", "o_proj", "down_proj")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.0 if parameter is zero_centred else 1.0)
            continue
        scale = 1 / math.sqrt(parameter.shape[1])
        if name.endswith("embed_tokens.weight"):
            scale = 1.0
        elif name == "dit.proj_out.weight":
            scale = 0.0
        elif name.startswith("dit.modulation"):
            scale *= 0.1
        elif any(f"{end}.weight" in name for end in branch_ends):
            scale *= 0.5
        with torch.no_grad():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for the matrices inside the blocks (Jordan et al., 2024).

    It needs about half the steps AdamW does, which is what two cores can afford. Updates are scaled
    to the root mean square AdamW's have (Liu et al., 2025), so that both share a learning rate.
    fp32 throughout: bf16 products are fifty times slower on most CPUs.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalized(parameter.grad.lerp(state["momentum"], group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalized(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: five Newton-Schulz steps with Jordan's coefficients."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def split_parameters(model: DemoModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside blocks and layers, for Muon; everything else, for AdamW."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ("blocks." in name or "layers." in name)]
    chosen = set(map(id, inner))
    return inner, [p for p in model.parameters() if id(p) not in chosen]
