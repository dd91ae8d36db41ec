"""A small checkpoint whose text encoder has a massive activation, as the published one has.

In the published model the residual of an ``<|im_start|>`` token grows to about 9,100 in the middle layers
and the last two cancel it to about 100 (port notes of RGBA-Image-2.1). Here one channel is made to do so
by hand; nothing but the following reads or writes it:

- the embedding of ``<|im_start|>``, and of no other token, holds ``START`` there;
- one hidden unit of each MLP reads it and writes back what ``WRITES`` lists for its layer. The norm before
  it scales every token to a length of 8, the root of the width: a token that is nearly all massive reads as
  nearly 8 however large it is, so that the amount written hardly varies; other tokens read as exactly 0.

Why bf16 loses that token: of a number between 8,192 and 16,384 the eight significant bits of bf16 hold
multiples of 64. At the height of 9,200 the channel is rounded to one of these, and taking 9,200 away again
brings nothing back: what is left, some 50 of a token of length 80, is wrong by up to 40. Other channels and
other tokens never grow and lose nothing. fp32 has steps of 0.001 there.

With the residual stream in fp32 and bf16 beside it no sum is rounded, but each amount is before it is added.
``WRITES`` are numbers that bf16 holds and add up to 0, so that a token which reads as 8 throughout would
survive. The first layers to write read one that is not all massive yet, though: the amount they write is
between two numbers of bf16, and how far from the nearer one depends on what else the token holds, hence on
the prompt. Some prompts come through and some do not. Only fp32 throughout keeps every token.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..demo.layout import new_text_encoder
from ..demo.tiny import DIT, write_tiny_checkpoint
from ..graphs.text_encoder import TextEncoderConfig

MASSIVE_TOKEN = "<|im_start|>"
WIDTH = DIT.context_in_dim
CHANNEL = 0
UNIT = 0
"""The hidden unit of each MLP that reads the channel and writes to it."""
START = 96
WRITES = (0, 576, 1152, 2304, 5184, 0, -4608, -4608)
"""What each layer adds to the channel of a token that is all massive: up to about 9,200, then back."""
CONTENT_GAIN = 4
"""On what the layers write to other channels: it brings a token to a length of about 75 at the end."""


def write_massive_checkpoint(folder: str | Path, seed: int = 0) -> Path:
    """Write the tiny checkpoint with such a text encoder to ``folder``; the same seed gives the same weights.

    The text encoder has 8 layers of width 64 and random weights, bf16. Needs diffusers and transformers.
    """
    folder = write_tiny_checkpoint(folder, seed)
    tokenizer = Tokenizer.from_file(str(folder / "processor" / "tokenizer.json"))
    config = TextEncoderConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=WIDTH, intermediate_size=128,
        num_hidden_layers=len(WRITES), num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_theta=5e6,
    )  # fmt: skip
    encoder = new_text_encoder(config, tokenizer, (6, 5, 5), tie_embeddings=False)
    [massive_token] = tokenizer.encode(MASSIVE_TOKEN).ids
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.ndim > 1:  # the scales of norms stay at 1: what a unit reads is then known
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5, generator=generator)
        _make_massive(dict(encoder.model.language_model.named_parameters()), massive_token)
    encoder.to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    return folder


def _make_massive(weights: Mapping[str, Tensor], token: int) -> None:
    """Change the text stack's ``weights`` in place; those of linear layers are ``[out, in]``."""
    weights["embed_tokens.weight"][:, CHANNEL] = 0
    weights["embed_tokens.weight"][token, CHANNEL] = START
    for index, write in enumerate(WRITES):
        attention, mlp = (f"layers.{index}.{part}" for part in ("self_attn", "mlp"))
        for into_residual in (weights[f"{attention}.o_proj.weight"], weights[f"{mlp}.down_proj.weight"]):
            into_residual *= CONTENT_GAIN
            into_residual[CHANNEL] = 0
        for from_residual in (weights[f"{mlp}.gate_proj.weight"], weights[f"{mlp}.up_proj.weight"]):
            from_residual[UNIT] = 0
            from_residual[UNIT, CHANNEL] = 1
        # silu(8) * 8 is 64 but for 0.03 %: the square of what the unit reads, thus the width.
        weights[f"{mlp}.down_proj.weight"][:, UNIT] = 0
        weights[f"{mlp}.down_proj.weight"][CHANNEL, UNIT] = write / WIDTH
